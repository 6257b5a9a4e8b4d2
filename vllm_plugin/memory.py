"""Reads the memory of another process on the same host: one copy, straight into its place (process_vm_readv(2)).

The receiver reads. Nobody but the receiver itself ever writes into its memory, so a session that it has revoked is
really over, and a sender that lies about addresses can spoil nothing but its own blocks.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["MAX_VECTORS", "common_ancestor", "forbid_read", "host_identity", "let_read", "read", "vectors"]

#: Linux takes that many pieces in one call (IOV_MAX).
MAX_VECTORS = 1024
_PR_SET_PTRACER = 0x59616D61

_PIECE = np.dtype([("address", np.uint64), ("size", np.uint64)])
_libc = ctypes.CDLL(None, use_errno=True)

#: Processes that may read this one, each as often as it was allowed to.
_readers: list[int] = []
_lock = threading.Lock()


def host_identity() -> str:
    """Equal for two processes that can name each other by process id: same kernel, same process id namespace. Empty
    where this kind of reading does not exist."""
    if not hasattr(_libc, "process_vm_readv"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def let_read(pid: int) -> None:
    """Lets that process read ours, where the kernel allows it only to ancestors (Yama). Without Yama the call fails,
    and nothing had to be allowed. `forbid_read` takes it back."""
    with _lock:
        _readers.append(pid)
        _allow_readers()


def forbid_read(pid: int) -> None:
    """Takes back what was allowed once; a process that was allowed twice still has it."""
    with _lock:
        if pid in _readers:
            _readers.remove(pid)
            _allow_readers()


def _allow_readers() -> None:
    # The kernel remembers one process, and allows its descendants too: for several the nearest one that they all come
    # from, which is their engine core.
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(common_ancestor(_readers)), 0, 0, 0)


def common_ancestor(pids: Sequence[int]) -> int:
    """The nearest process that all of them are or come from; those that are gone do not count. 0 for none."""
    lines = [_line(pid) for pid in pids if Path(f"/proc/{pid}").exists()]
    if not lines:
        return 0
    return next((pid for pid in lines[0] if all(pid in line for line in lines)), 1)


def _line(pid: int) -> list[int]:
    """A process and those that it comes from, itself first."""
    line = [pid]
    while line[-1] > 1:
        try:
            # After the name, which may contain anything: state and parent (proc_pid_stat(5)).
            line.append(int(Path(f"/proc/{line[-1]}/stat").read_text().rpartition(")")[2].split()[1]))
        except (OSError, ValueError, IndexError):
            break
    return line


def vectors(addresses: Sequence[int], sizes: Sequence[int], blocks: Sequence[int], strides: Sequence[int] = ()) -> Any:
    """Address and size of each piece, in wire order, as the kernel takes them (`struct iovec`).

    Args:
        addresses: of block 0 of each layer. sizes: bytes of one block of each layer.
        strides: bytes from one block to the next in each layer; blocks that follow each other without them.
    """
    pieces = np.empty((len(addresses), len(blocks)), _PIECE)
    stride = np.array(strides or sizes, np.uint64)[:, None]
    pieces["address"] = np.array(addresses, np.uint64)[:, None] + np.array(blocks, np.uint64)[None, :] * stride
    pieces["size"] = np.array(sizes, np.uint64)[:, None]
    return pieces.reshape(-1)


def read(pid: int, remote: Any, local: Any) -> int:
    """Copies `remote` pieces of that process into `local` pieces of this one; returns the number of bytes.

    Raises:
        OSError: the process is gone, does not let itself be read, or has no such memory.
    """
    got = _libc.process_vm_readv(
        ctypes.c_int(pid),
        ctypes.c_void_p(local.ctypes.data),
        ctypes.c_ulong(len(local)),
        ctypes.c_void_p(remote.ctypes.data),
        ctypes.c_ulong(len(remote)),
        ctypes.c_ulong(0),
    )
    wanted = int(local["size"].sum())
    if got < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if got != wanted:
        raise OSError(0, f"only {got} of {wanted} bytes of the other process could be read")
    return wanted


if hasattr(_libc, "process_vm_readv"):
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
