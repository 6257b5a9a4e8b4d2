"""Messages between an engine core and the data servers of its workers, and between two workers.

Frames and handshake are those of `vllm_plugin.wire`. All calls carry a number that the answer repeats.
"""

from __future__ import annotations

import msgspec

from vllm_plugin.messages import Answer
from vllm_plugin.topology import Place
from vllm_plugin.wire import ProtocolError

__all__ = [
    "AllowSession",
    "DataMessage",
    "Measure",
    "Offer",
    "Patch",
    "Probe",
    "Probed",
    "Push",
    "Pushed",
    "Reach",
    "Reached",
    "RevokeSession",
    "SharedLayer",
    "Write",
    "Written",
    "decode_data",
]


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
    sent ahead, and later only what has changed in them. `source_places`, `target_places`: what of each block, where the
    two workers are cut differently (`vllm_plugin.topology`); the same in all pushes to one worker.
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
    source_places: tuple[Place, ...] = ()
    target_places: tuple[Place, ...] = ()


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

    `host`: equal on both sides where one can read the other's memory by process id. `backend`: what A's operator asks
    for, "" for the fastest. `bytes_per_s`: A's limit. `device`: kind of memory that A's cache lies in, as torch names
    it. `places`: what of each block of B this connection is for, none for all of it; "layer" and "block" mean just that
    in all later messages. `session` is "" where nothing is to be written.
    """

    session: str
    host: str
    pid: int
    backend: str
    bytes_per_s: float
    device: str = "cpu"
    places: tuple[Place, ...] = ()


class SharedLayer(msgspec.Struct):
    """One layer of a KV cache in GPU memory, for another process on the same host: `blocks` blocks from byte `start` of
    a storage; the rest is what torch needs to map that storage."""

    blocks: int
    start: int
    handle: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_required: bool


class Offer(msgspec.Struct, tag="offer"):
    """Worker A -> worker B, for transports by which B reads A's memory: addresses of block 0 of each layer, bytes of
    one block of each, and bytes from one block to the next.

    For `memory`, `check` lies at `check_address`: B reads it to see whether it can. For `rdma`, `agent` is what NIXL
    needs to know of A's agent. For `cuda_ipc`, `layers` lie on the GPU `gpu`, or `refusal` says why they cannot be
    shared.
    """

    addresses: list[int]
    sizes: list[int]
    strides: list[int]
    check_address: int = 0
    check: bytes = b""
    agent: bytes = b""
    gpu: str = ""
    layers: list[SharedLayer] = []
    refusal: str = ""


class Reached(msgspec.Struct, tag="reached"):
    """B -> A: the transport of this connection; `message`: why no faster one. To all but `tcp` A answers with an
    `Offer`, and for `memory` and `cuda_ipc` lets process `pid` read; then comes the final `Reached`."""

    transport: str
    same_host: bool
    message: str = ""
    pid: int = 0


class Measure(msgspec.Struct, tag="measure"):
    """Worker A -> worker B: take these blocks of A, with `sizes` bytes in each layer, to nowhere. Over TCP their bytes
    follow. Answered by `Written`."""

    blocks: list[int]
    sizes: list[int]


class Write(msgspec.Struct, tag="write"):
    """Worker A -> worker B, followed by `size` raw bytes: for each layer in name order, each block in list order.

    Where B reads A's memory nothing follows: it takes `source_blocks` from there. `urgent`: as fast as it can.
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


class Receiving(msgspec.Struct, tag="receiving"):
    """Worker B -> worker A, before `Written`: bytes are still coming in. Said from time to time, so that a slow link is
    not taken for a dead one."""


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
    | Receiving
    | Written
    | Answer
)

_decoder: msgspec.msgpack.Decoder[DataMessage] = msgspec.msgpack.Decoder(DataMessage)


def decode_data(body: bytes | bytearray) -> DataMessage:
    """Raises: ProtocolError `bad_frame`."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError("bad_frame", str(error)) from error
