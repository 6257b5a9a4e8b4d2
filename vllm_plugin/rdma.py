"""KV blocks by NIXL (UCX): RDMA between hosts that have it, and over TCP or shared memory where they do not.

As with `vllm_plugin.memory` the receiver reads. NIXL is not installed by default: `pip install nixl-cu12` (its packages
for other CUDA versions do as well); on machines without CUDA, without its dependencies.
"""

from __future__ import annotations

import importlib
import secrets
import time
from typing import Any

import numpy as np

from vllm_plugin.wire import ProtocolError

__all__ = ["Nixl", "available"]

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
TRANSFER_TIMEOUT_S = 10.0


def _api() -> Any:
    """Raises: ImportError."""
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    raise ImportError("NIXL is not installed")


def available() -> bool:
    try:
        _api()
    except ImportError:
        return False
    return True


class Nixl:
    """One worker's NIXL agent, with its KV cache registered.

    Raises:
        ProtocolError: `transport_unavailable` when there is no NIXL, or none of its backends starts.
    """

    def __init__(self, tensors: list[Any]) -> None:
        try:
            api = _api()
            self._agent = api.nixl_agent(f"vllm-hi-{secrets.token_hex(8)}", api.nixl_agent_config(backends=["UCX"]))
            device = tensors[0].device
            self._kind, self._device = ("DRAM", 0) if device.type == "cpu" else ("VRAM", device.index or 0)
            self._agent.register_memory(tensors)
        except Exception as error:
            # NIXL raises what its C++ side does; a worker must not end because of it.
            raise ProtocolError("transport_unavailable", f"NIXL cannot be used: {error}") from error

    @property
    def metadata(self) -> bytes:
        """What another agent needs to read our memory."""
        return bytes(self._agent.get_agent_metadata())

    def register(self, tensors: list[Any]) -> None:
        """Lets blocks be read into these too."""
        self._agent.register_memory(tensors)

    def meet(self, metadata: bytes) -> str:
        """Makes another agent known; returns its name. Raises: ProtocolError `transport_unavailable`."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise ProtocolError("transport_unavailable", f"NIXL refuses the other agent: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def read(self, name: str, remote: Any, local: Any) -> int:
        """Copies pieces (`vllm_plugin.memory.vectors`) of another agent's memory into ours; returns the bytes.

        Raises:
            ProtocolError: `source_unreadable`.
        """
        handle = None
        try:
            here = self._agent.get_xfer_descs(self._rows(local), mem_type=self._kind)
            there = self._agent.get_xfer_descs(self._rows(remote), mem_type=self._kind)
            handle = self._agent.initialize_xfer("READ", here, there, name)
            state = self._agent.transfer(handle)
            ends = time.monotonic() + TRANSFER_TIMEOUT_S
            while state == "PROC" and time.monotonic() < ends:
                # Short, for a block takes no longer; and the interpreter is let go.
                time.sleep(5e-5)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise ProtocolError("source_unreadable", f"NIXL failed: {error}") from error
        finally:
            if handle is not None:
                self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ProtocolError("source_unreadable", f"NIXL ended in state {state}")
        return int(local["size"].sum())

    def _rows(self, pieces: Any) -> Any:
        """NIXL's descriptors: address, size, device."""
        rows = np.full((len(pieces), 3), self._device, np.uint64)
        rows[:, 0], rows[:, 1] = pieces["address"], pieces["size"]
        return rows
