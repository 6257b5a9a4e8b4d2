"""The engine's side of a standby: what a `vllm serve` that was started by one tells it, and serving on its port.

Both bind the port with SO_REUSEPORT. The standby answers until this server listens, and stops listening then: no
request ever passes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from vllm_plugin import compat
from vllm_plugin.engine_process import PIPE_VARIABLE

__all__ = ["ID_VARIABLE", "MODEL_VARIABLE", "Keeper", "is_kept", "serve_on_shared_port"]

logger = logging.getLogger("vllm.vllm_hi")

#: The model to serve instead of the one on the command line, whose place there only vLLM's parser knows.
MODEL_VARIABLE = "VLLM_HI_STANDBY_MODEL"
#: The id that the panel knows this instance by.
ID_VARIABLE = "VLLM_HI_STANDBY_ID"
LISTENING_POLL_S = 0.05


def is_kept(environ: Mapping[str, str] = os.environ) -> bool:
    """True in an engine that a standby has started."""
    return bool(environ.get(PIPE_VARIABLE))


class Keeper:
    """The standby that has started this process."""

    def __init__(self, descriptor: int, vllm_hi_id: str | None) -> None:
        self._descriptor = descriptor
        self.vllm_hi_id = vllm_hi_id
        #: Warmed up, and known to the panel.
        self.announced = False
        #: The standby was asked to end this engine, and will do so any moment.
        self.ending = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Keeper | None:
        text = environ.get(PIPE_VARIABLE, "")
        return cls(int(text), environ.get(ID_VARIABLE) or None) if text.isdecimal() else None

    async def tell_when_listening(self, listening: Callable[[], bool]) -> None:
        while not listening():  # noqa: ASYNC110
            await asyncio.sleep(LISTENING_POLL_S)
        self.tell("listening")

    def registered(self) -> None:
        if not self.announced:
            self.announced = True
            self.tell("registered")

    def put_down(self) -> None:
        """This engine is not needed any more: the standby ends it and stands by without one."""
        self.ending = True
        self.tell("put_down")

    def destroyed(self) -> None:
        self.tell("destroyed")

    def tell(self, event: str) -> None:
        try:
            os.write(self._descriptor, json.dumps({"event": event}).encode() + b"\n")
        except OSError as error:
            # It is gone, and this process will hear of that from the kernel.
            logger.warning("vLLM-HI: the standby that started this engine does not hear it: %s", error)


def serve_on_shared_port(args: Namespace) -> None:
    """What `vllm serve` does with one API server, but for the socket: vLLM opens it as for several servers."""
    import uvloop

    if args.model_tag is not None:
        args.model = args.model_tag
    args.api_server_count = None
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(args))


async def _serve(args: Namespace) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("terminated")

    # Until vLLM's server is up and has a handler of its own.
    signal.signal(signal.SIGTERM, interrupt)
    setup = compat.server_function("setup_server")
    shared = {"reuse_port": True} if "reuse_port" in inspect.signature(setup).parameters else {}
    address, sock = setup(args, **shared)
    await compat.server_function("run_server_worker")(address, sock, args)
