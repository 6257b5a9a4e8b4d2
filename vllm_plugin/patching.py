"""Only what has changed in a KV block since it was sent: for the block that is being written, over a slow link.

The layout of keys inside a block is the attention backend's own affair (`cpu_isa`), so this knows nothing of tokens: A
remembers the bytes that it has sent and compares. A block that A writes while it is read may be sent torn; what was
torn differs from what it becomes, so a later patch mends it, at the latest the one that is made while the request is
frozen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_plugin.wire import ProtocolError

__all__ = ["apply_patch", "patch_of"]

#: Bytes of a line: the unit of comparison.
LINE = 64


def _lines(block: Any) -> Any:
    size = LINE
    while len(block) % size:
        size //= 2
    return block.reshape(-1, size)


def patch_of(current: Any, shadow: Any) -> bytes:
    """What turns `shadow` into `current` (arrays of bytes of one block, in wire order): a bit for each line, and the
    lines that differ. Afterwards `shadow` is `current`."""
    now, then = _lines(current), _lines(shadow)
    changed = (now != then).any(axis=1)
    lines = now[changed]
    then[changed] = lines
    return bytes(np.packbits(changed).tobytes() + lines.tobytes())


def apply_patch(block: Any, patch: bytes | bytearray) -> None:
    """Changes an array of bytes of one block.

    Raises:
        ProtocolError: `size_mismatch` when the patch has more or fewer lines than it announces.
    """
    lines = _lines(block)
    head = -(-len(lines) // 8)
    changed = np.unpackbits(np.frombuffer(patch, np.uint8, count=min(head, len(patch))))[: len(lines)].astype(bool)
    body = np.frombuffer(patch, np.uint8)[head:]
    if len(patch) < head or body.size != int(changed.sum()) * lines.shape[1]:
        raise ProtocolError("size_mismatch", "the patch does not have the lines that it announces")
    lines[changed] = body.reshape(-1, lines.shape[1])
