"""Reads a client's body and writes the one that an instance gets: the client's own, plus our tags."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from proxy.errors import ApiError
from proxy.movable import COMPLETION_PATHS, RESPONSES, TEXT

__all__ = ["ClientRequest", "parse_request"]

_OURS = "vllm_hi_"


@dataclass(frozen=True)
class ClientRequest:
    """One parsed request.

    Attributes:
        path: the route, without a query string.
        body: the JSON object as the client sent it, but for the model's name (`asking_for`).
        model: the served model name.
        streamed: whether the answer is a stream of events.
        wants_token_ids: whether the client itself asked for `return_token_ids`.
        choices: how many choices the answer will have.
    """

    path: str
    body: dict[str, Any]
    model: str
    streamed: bool
    wants_token_ids: bool
    choices: int

    def asking_for(self, model: str) -> ClientRequest:
        """Returns the request with the name by which instances know the model; it is routed by the client's own."""
        return self if model == self.model else replace(self, body={**self.body, "model": model})

    @property
    def reports_token_ids(self) -> bool:
        """Whether the instance puts token ids on the wire: we ask for them wherever that changes nothing else."""
        # Together with an echo, vLLM takes them for a wish not to see the prompt's text.
        echoes = self.path == TEXT and bool(self.body.get("echo"))
        return self.path in COMPLETION_PATHS and (self.wants_token_ids or not echoes)

    def tagged(self, owner: str, ticket: str | None = None) -> bytes:
        """Returns the body for one leg.

        Args:
            owner: `<worker id>/<stream id>`.
            ticket: only on a second leg.
        """
        extra = self._foreign_extras()
        extra["vllm_hi_stream"] = owner
        if self.choices > 1:
            extra["vllm_hi_choices"] = self.choices
        if ticket is not None:
            extra["vllm_hi_ticket"] = ticket
        body = {**self.body, "vllm_xargs": extra}
        if self.streamed and self.reports_token_ids:
            body["return_token_ids"] = True
        if self.path == RESPONSES and not body.get("request_id"):
            # The response's id: with the same on each leg, B stores the response under the id that the client has.
            body["request_id"] = f"resp_{owner.partition('/')[2]}"
        return _encode(body)

    def plain(self) -> bytes:
        """Returns the body without any tags, for paths whose requests are relayed but never moved."""
        if not self.body.get("vllm_xargs"):
            return _encode(self.body)
        return _encode({**self.body, "vllm_xargs": self._foreign_extras()})

    def _foreign_extras(self) -> dict[str, Any]:
        return {k: v for k, v in (self.body.get("vllm_xargs") or {}).items() if not k.startswith(_OURS)}


def _encode(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, written as an escape by the client
        return json.dumps(body, separators=(",", ":")).encode()


def parse_request(path: str, raw: bytes) -> ClientRequest:
    """Parses a client's body. `path`: without a query string.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "The request body is not valid JSON.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "The request body must be a JSON object.", code="invalid_json")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "`model` must name a served model as a string.", param="model", code="invalid_model")
    if not isinstance(body.get("vllm_xargs") or {}, dict):
        raise ApiError(400, "`vllm_xargs` must be an object.", param="vllm_xargs", code="invalid_value")
    return ClientRequest(
        path=path,
        body=body,
        model=model,
        streamed=body.get("stream") is True,
        wants_token_ids=body.get("return_token_ids") is True,
        choices=_count_choices(body) if path in COMPLETION_PATHS else 1,
    )


def _count_choices(body: dict[str, Any]) -> int:
    n = body.get("n")
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return (n if isinstance(n, int) and n > 0 else 1) * (len(prompt) if several and isinstance(prompt, list) else 1)
