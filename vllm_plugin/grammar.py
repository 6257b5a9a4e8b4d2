"""Brings the freshly compiled grammar of a moved request to where it stood on the source.

Its state follows from the tokens alone, but behind a reasoning parser not from all tokens at once: vLLM feeds the
grammar only what comes after the reasoning, and asks the reasoning parser at every step with the tokens known then.
Asked once with all tokens, some parsers look at the last marker only, or see no end at all. So the tokens are
replayed one by one, each with exactly the tokens before it, as the source did.
"""

from __future__ import annotations

from typing import Any

__all__ = ["GrammarReplay", "replay_grammar"]


class GrammarReplay:
    """The replay of one request; it can go on as more tokens arrive, so that little is left for the commit.

    To `StructuredOutputManager.accept_tokens` it stands for the request as it was after one of its earlier tokens:
    these attributes are all that is read there.
    """

    def __init__(self, request: Any) -> None:
        self._request = request
        self.request_id = request.request_id
        self.use_structured_output = request.use_structured_output
        self.structured_output_request = request.structured_output_request
        self.prompt_token_ids = request.prompt_token_ids
        self.all_token_ids = list(request.prompt_token_ids or ())
        self._replayed = 0

    def advance(self, manager: Any) -> bool:
        """Feeds the tokens that were not fed yet; returns False if the grammar rejects one.

        Args:
            manager: the engine's `StructuredOutputManager`. The grammar must be compiled.
        """
        output = self._request.output_token_ids
        while self._replayed < len(output):
            token = output[self._replayed]
            self._replayed += 1
            self.all_token_ids.append(token)
            if not manager.accept_tokens(self, [token]):
                return False
        return True


def replay_grammar(manager: Any, request: Any) -> bool:
    """Feeds all output tokens of `request` to its grammar, which has seen none of them."""
    return not request.use_structured_output or GrammarReplay(request).advance(manager)
