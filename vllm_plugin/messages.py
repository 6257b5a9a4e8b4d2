"""Messages between two engine cores.

Frames and handshake are those of `vllm_plugin.wire`. All calls carry a number that the answer repeats.
"""

from __future__ import annotations

import msgspec

from vllm_plugin.topology import Layout
from vllm_plugin.wire import ProtocolError

__all__ = [
    "Answer",
    "CloseSession",
    "Coming",
    "Commit",
    "CommitItem",
    "CommitPart",
    "Expect",
    "Expectation",
    "ExpectedMember",
    "FirstStep",
    "Grow",
    "GrowItem",
    "Grown",
    "GrownItem",
    "LogprobRows",
    "OpenSession",
    "Parked",
    "PeerMessage",
    "Prepare",
    "Refusal",
    "Refusals",
    "Release",
    "Renew",
    "SessionOpened",
    "decode_peer",
]


class Refusal(msgspec.Struct):
    """Why one request cannot take the next step; `ticket` names it between the two engines."""

    ticket: str
    code: str
    message: str


# -- engine core A -> engine core B ------------------------------------------------------------------------------------


class OpenSession(msgspec.Struct, tag="open_session"):
    """`factors`: A's compatibility factors by name (`vllm_plugin.compatibility`)."""

    call: int
    job: str
    attempt: int
    source: str
    lease_s: float
    factors: dict[str, str] = {}


class SessionOpened(msgspec.Struct, tag="session_opened"):
    """`data_ports`: the data server of each worker of B, by rank. `layout`: what of a block lies on which rank."""

    call: int
    session: str
    data_host: str
    data_ports: list[int]
    layout: Layout


class ExpectedMember(msgspec.Struct):
    """One engine request that B's front end makes of the client's body: its prompt and choice number, and what B must
    find in it. Digests are SHA-256."""

    prompt: int
    choice: int
    prompt_digest: bytes
    sampling_digest: bytes
    queueing_digest: bytes


class Expectation(msgspec.Struct):
    """A second leg that is on its way to B. Everywhere below, `part` is a position in `members`.

    `adapter`: name and fingerprint of its LoRA adapter, empty without one. `age_s`: seconds since it arrived on A."""

    ticket: str
    stream: str
    members: list[ExpectedMember]
    adapter: str = ""
    age_s: float = 0.0


class Expect(msgspec.Struct, tag="expect"):
    call: int
    expectations: list[Expectation]


class Answer(msgspec.Struct, tag="answer"):
    call: int
    ok: bool
    code: str = ""
    message: str = ""


class GrowItem(msgspec.Struct):
    """What A has of one member by now.

    Attributes:
        output_tokens: those that B has not been told yet.
        full_tokens: tokens in blocks that A will never write again.
        capacity_tokens: for how many tokens B must hold blocks; 0 while A has computed none.
        sent_tokens: tokens whose blocks are complete on B; others with the same prefix may share them.
        staged: B holds host memory instead of blocks of its cache; the ids that it answers name slots there.
    """

    ticket: str
    part: int
    output_tokens: list[int]
    full_tokens: int
    capacity_tokens: int
    sent_tokens: int
    staged: bool = False


class Grow(msgspec.Struct, tag="grow"):
    call: int
    items: list[GrowItem]


class GrownItem(msgspec.Struct):
    """`hit_tokens`: leading tokens that B already had in its prefix cache; their blocks must not be written."""

    ticket: str
    part: int
    hit_tokens: int
    block_ids: list[int]


class Grown(msgspec.Struct, tag="grown"):
    call: int
    items: list[GrownItem]
    refused: list[Refusal]


class Prepare(msgspec.Struct, tag="prepare"):
    """Asks B for a run slot per ticket; starts B's commit deadline. `queue`: no run slot is asked for, B takes what is
    committed into its queue and says `Producing` at once."""

    call: int
    tickets: list[str]
    queue: bool = False


class Refusals(msgspec.Struct, tag="refusals"):
    """Answer to `Prepare` and `Commit`: what is not listed was accepted. B gives it between two steps, and a step takes
    `step_s` at the moment; 0 when B is idle."""

    call: int
    refused: list[Refusal]
    step_s: float = 0.0


class Coming(msgspec.Struct, tag="coming"):
    """A commit is about to come, in `within_s` if all goes well. Should B be between two steps shortly before that, it
    waits, `late_s` longer if need be, and does not begin a step that the commit would have to sit out."""

    within_s: float
    late_s: float = 0.0


class LogprobRows(msgspec.Struct):
    """Sampled logprobs so far: `rows` = output tokens, `columns` = top logprobs + 1; arrays are row-major.

    token_ids: int32 [rows, columns]; logprobs: float32 [rows, columns]; ranks: int64 [rows].
    """

    rows: int
    columns: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes


class CommitPart(msgspec.Struct):
    """Everything B still needs of one member. `output_tokens`: those that B has not been told yet. `ended`: vLLM's
    status and stop reason if the member has ended on A already; then the rest describes what its client must get."""

    output_tokens: list[int]
    computed_tokens: int
    generator: bytes | None
    logprobs: LogprobRows | None
    prefill: dict[str, int] | None
    ended: tuple[str, int | str | None] | None = None


class CommitItem(msgspec.Struct):
    """`parts`: one per member; all are taken or none."""

    ticket: str
    parts: list[CommitPart]


class Commit(msgspec.Struct, tag="commit"):
    call: int
    items: list[CommitItem]


class Release(msgspec.Struct, tag="release"):
    """A will not write into these windows any more; B drops what is still parked under the tickets."""

    tickets: list[str]
    reason: str


class Renew(msgspec.Struct, tag="renew"):
    lease_s: float


class CloseSession(msgspec.Struct, tag="close_session"):
    call: int


# -- engine core B -> engine core A, unasked ---------------------------------------------------------------------------


class Parked(msgspec.Struct, tag="parked"):
    """The request has arrived and waits (`ok`), was refused, or is gone (client left, lease over): then `code`
    says why."""

    ticket: str
    ok: bool
    code: str = ""
    message: str = ""


class FirstStep(msgspec.Struct, tag="first_step"):
    """B has made its first step with a stream, that many milliseconds after it had taken the commit."""

    ticket: str
    step_ms: float


PeerMessage = (
    OpenSession
    | SessionOpened
    | Expect
    | Answer
    | Grow
    | Grown
    | Prepare
    | Refusals
    | Coming
    | Commit
    | Release
    | Renew
    | CloseSession
    | Parked
    | FirstStep
)

_peer_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


def decode_peer(body: bytes | bytearray) -> PeerMessage:
    """Raises: ProtocolError `bad_frame`."""
    try:
        return _peer_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError("bad_frame", str(error)) from error
