"""Messages between two engine cores (peer), and between an engine core and the data servers of workers.

Frames and handshake are those of `vllm_plugin.wire`. All calls carry a number that the answer repeats.
"""

from __future__ import annotations

import msgspec

from vllm_plugin.wire import ProtocolError

__all__ = [
    "AllowSession",
    "Answer",
    "CloseSession",
    "Coming",
    "Commit",
    "CommitItem",
    "CommitPart",
    "DataMessage",
    "Expect",
    "Expectation",
    "ExpectedMember",
    "FirstStep",
    "Grow",
    "GrowItem",
    "Grown",
    "GrownItem",
    "LogprobRows",
    "Measure",
    "Offer",
    "OpenSession",
    "Parked",
    "Patch",
    "PeerMessage",
    "Prepare",
    "Probe",
    "Probed",
    "Push",
    "Pushed",
    "Reach",
    "Reached",
    "Refusal",
    "Refusals",
    "Release",
    "Renew",
    "RevokeSession",
    "SessionOpened",
    "Write",
    "Written",
    "decode_data",
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
    """`data_ports`: the data server of each worker of B, by rank."""

    call: int
    session: str
    data_host: str
    data_ports: list[int]


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
    """

    ticket: str
    part: int
    output_tokens: list[int]
    full_tokens: int
    capacity_tokens: int
    sent_tokens: int


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
    """Asks B for a run slot per ticket; starts B's commit deadline."""

    call: int
    tickets: list[str]


class Refusals(msgspec.Struct, tag="refusals"):
    """Answer to `Prepare` and `Commit`: what is not listed was accepted. B gives it between two steps, and a step takes
    `step_s` at the moment; 0 when B is idle."""

    call: int
    refused: list[Refusal]
    step_s: float = 0.0


class Coming(msgspec.Struct, tag="coming"):
    """Requests are frozen, and their commit follows within milliseconds. Should B be between two steps before that, it
    may wait for it up to `within_s`, and not begin a step that the commit would have to sit out."""

    within_s: float


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

# -- data servers ------------------------------------------------------------------------------------------------------


class AllowSession(msgspec.Struct, tag="allow_session"):
    """Engine core B -> its worker: `Write` frames of this session are welcome."""

    call: int
    session: str


class RevokeSession(msgspec.Struct, tag="revoke_session"):
    """Engine core -> its worker: drop the session's connections; answered when nobody writes or sends any more."""

    call: int
    session: str


class Push(msgspec.Struct, tag="push"):
    """Engine core A -> its worker: send `source_blocks` into `target_blocks` of the worker at `host:port`, and read the
    generator states of `generators` (request ids).

    `owners`: for each block a number of the request that it belongs to, the same in all pushes. `urgent`: requests are
    frozen and wait for it. `open`: (source, target, owner) of blocks that A still writes; over a slow link they are
    sent ahead, and later only what has changed in them.
    """

    call: int
    session: str
    host: str
    port: int
    source_blocks: list[int]
    target_blocks: list[int]
    generators: list[str]
    owners: list[int] = []
    urgent: bool = False
    open: list[tuple[int, int, int]] = []


class Pushed(msgspec.Struct, tag="pushed"):
    """`transport`: what carried the blocks, "" where there were none."""

    call: int
    ok: bool
    sent_bytes: int = 0
    generators: dict[str, bytes] = {}
    message: str = ""
    transport: str = ""


class Probe(msgspec.Struct, tag="probe"):
    """Engine core A -> its worker: how fast is the way to the worker at `host:port`?"""

    call: int
    host: str
    port: int


class Probed(msgspec.Struct, tag="probed"):
    """`transport` would be used; `reason`: why no faster one; `block_s`: seconds that a single block takes."""

    call: int
    ok: bool
    transport: str = ""
    reason: str = ""
    bytes_per_s: float = 0.0
    block_s: float = 0.0
    message: str = ""


class Reach(msgspec.Struct, tag="reach"):
    """Worker A -> worker B, first on a connection: how can blocks travel?

    `host`: equal on both sides where one can read the other's memory by process id, "" where the cache is not in host
    memory. `backend`: what A's operator asks for, "" for the fastest. `bytes_per_s`: A's limit.
    """

    session: str
    host: str
    pid: int
    backend: str
    bytes_per_s: float


class Offer(msgspec.Struct, tag="offer"):
    """Worker A -> worker B, for transports by which B reads A's memory: addresses of block 0 of each layer and bytes of
    one block of each.

    For `memory`, `check` lies at `check_address`: B reads it to see whether it can. For `rdma`, `agent` is what NIXL
    needs to know of A's agent.
    """

    addresses: list[int]
    sizes: list[int]
    check_address: int = 0
    check: bytes = b""
    agent: bytes = b""


class Reached(msgspec.Struct, tag="reached"):
    """B -> A: the transport of this connection; `message`: why no faster one. To `memory` and `rdma` A answers with an
    `Offer`, and for `memory` lets process `pid` read; then comes the final `Reached`."""

    transport: str
    same_host: bool
    message: str = ""
    pid: int = 0


class Measure(msgspec.Struct, tag="measure"):
    """Worker A -> worker B: take these blocks of A to nowhere. Over TCP their bytes follow. Answered by `Written`."""

    blocks: list[int]


class Write(msgspec.Struct, tag="write"):
    """Worker A -> worker B, followed by `size` raw bytes: for each layer in name order, each block in list order.

    By transport `memory` nothing follows: B reads `source_blocks` out of A's memory. `urgent`: as fast as it can.
    """

    session: str
    blocks: list[int]
    size: int
    source_blocks: list[int] = []
    urgent: bool = False


class Patch(msgspec.Struct, tag="patch"):
    """Worker A -> worker B, followed by `size` raw bytes (`vllm_plugin.patching`): what changed in a block."""

    session: str
    block: int
    size: int


class Written(msgspec.Struct, tag="written"):
    ok: bool
    code: str = ""
    message: str = ""


DataMessage = (
    AllowSession
    | RevokeSession
    | Push
    | Pushed
    | Probe
    | Probed
    | Reach
    | Offer
    | Reached
    | Measure
    | Write
    | Patch
    | Written
    | Answer
)

_peer_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
_data_decoder: msgspec.msgpack.Decoder[DataMessage] = msgspec.msgpack.Decoder(DataMessage)


def decode_peer(body: bytes | bytearray) -> PeerMessage:
    """Raises: ProtocolError `bad_frame`."""
    try:
        return _peer_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError("bad_frame", str(error)) from error


def decode_data(body: bytes | bytearray) -> DataMessage:
    """Raises: ProtocolError `bad_frame`."""
    try:
        return _data_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError("bad_frame", str(error)) from error
