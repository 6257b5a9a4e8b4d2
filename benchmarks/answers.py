"""Everything a client saw of one answer, whatever API it came by: choices, channels, ends, and breaches of protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Answer", "Choice", "Request", "ToolCall"]


@dataclass(frozen=True)
class Request:
    """One request as a client would send it.

    Attributes:
        name: what kind it is, unique within a run.
        path: route, such as `/v1/chat/completions`.
        body: JSON body; `model` is filled in where it names none.
        repeatable: the same body gives the same tokens each time (greedy or seeded).
    """

    name: str
    path: str
    body: dict[str, Any]
    repeatable: bool = True

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass
class ToolCall:
    """One tool call of a choice, put together from its deltas."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Choice:
    """One of the choices of an answer, channel by channel.

    Attributes:
        tools: by their index within the choice.
        token_ids: empty on routes that carry none, or when not asked for.
        logprobs: of the reported tokens, in order; empty when not asked for. None for the first token of a prompt.
        alternatives: for each of those, log-probability by token text.
        offsets: characters before each of those, where the route says it (text completions).
    """

    text: str = ""
    reasoning: str = ""
    tools: dict[int, ToolCall] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    alternatives: list[dict[str, float]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Answer:
    """What the client got.

    Attributes:
        stream_id: the proxy's name for the stream (`x-vllm-hi-stream`), "" when it gave none.
        ids: every id of the answer that was seen; one response has one.
        choices: by index.
        usage: as the API names its fields, of the end of the answer.
        arrivals: for each event with tokens: monotonic time in seconds, number of tokens.
        deltas: events that brought something of an answer; the only progress on routes without token ids.
        document: a non-streamed answer as it came.
        faults: breaches of "what the client sees is one response", one sentence each.
        over: nothing more will come.
        error: why there is no complete answer, "" when there is one.
    """

    request: Request
    stream_id: str = ""
    ids: set[str] = field(default_factory=set)
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    deltas: int = 0
    document: dict[str, Any] | None = None
    faults: list[str] = field(default_factory=list)
    over: bool = False
    error: str = ""

    def choice(self, index: int) -> Choice:
        """Returns a choice, a new one when it is seen for the first time."""
        return self.choices.setdefault(index, Choice())

    def fault(self, sentence: str) -> None:
        """Notes a breach of protocol, once."""
        if sentence not in self.faults:
            self.faults.append(sentence)

    def name(self, identity: Any) -> None:
        """Notes an id of this answer."""
        self.ids.add(str(identity or ""))
        if len(self.ids) > 1:
            self.fault("the answer has several ids")

    # -- the whole, in the order of the choices ------------------------------------------------------------------------

    @property
    def ordered(self) -> list[Choice]:
        return [self.choices[index] for index in sorted(self.choices)]

    @property
    def text(self) -> str:
        return "".join(choice.text for choice in self.ordered)

    @property
    def token_ids(self) -> list[int]:
        return [token for choice in self.ordered for token in choice.token_ids]

    @property
    def logprobs(self) -> list[float | None]:
        return [value for choice in self.ordered for value in choice.logprobs]

    @property
    def prompt_token_ids(self) -> list[int]:
        """Of the first choice's prompt."""
        return self.ordered[0].prompt_token_ids if self.choices else []

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice."""
        return self.ordered[0].finish_reason if self.choices else None

    @property
    def tokens(self) -> int:
        """Output tokens of all choices: counted where the route carries them, else as billed."""
        return len(self.token_ids) or self.billed["completion_tokens"] or 0

    @property
    def progress(self) -> int:
        """Output tokens of the choice under way that has the fewest; events where the route carries no tokens."""
        going = [choice for choice in self.choices.values() if choice.finish_reason is None]
        lengths = [len(choice.token_ids) for choice in going or self.choices.values()]
        return min(lengths) if any(lengths) else self.deltas

    @property
    def billed(self) -> dict[str, Any]:
        """Usage under one set of names, whatever the API calls them."""
        prompt = self.usage.get("prompt_tokens", self.usage.get("input_tokens"))
        output = self.usage.get("completion_tokens", self.usage.get("output_tokens"))
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": self.usage.get("total_tokens")}
