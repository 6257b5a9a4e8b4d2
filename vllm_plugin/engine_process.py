"""The `vllm serve` that a standby runs beside itself, with all that descends from it.

It stays in the standby's process group: who kills that kills all of it. If the standby is killed alone, the kernel
tells the child to end (Linux).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_plugin.parent_death import end_with

__all__ = ["PIPE_VARIABLE", "EngineProcess", "adopt_orphans"]

logger = logging.getLogger("vllm.vllm_hi.standby")

#: Names the file descriptor on which the child says how far it is, one JSON object a line.
PIPE_VARIABLE = "VLLM_HI_STANDBY_PIPE"

#: Times 20 ms.
CLEAR_TRIES = 250

_PR_SET_CHILD_SUBREAPER = 36
_LINE_ENDS = re.compile(rb"[\r\n]+")
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class EngineProcess:
    """One child.

    Args:
        on_line: called with each line of its output, which also goes to our own output.
        on_message: called with each message that the plugin in it sends.
    """

    def __init__(self, on_line: Callable[[str], object], on_message: Callable[[dict[str, Any]], None]) -> None:
        self._on_line = on_line
        self._on_message = on_message
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        #: What descended from this process before, and is none of our business.
        self._strangers: list[int] = []

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises OSError: the program cannot be run."""
        self._strangers = _descendants(os.getpid())
        reading, writing = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                env={**environment, PIPE_VARIABLE: str(writing)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(writing,),
                preexec_fn=end_with(os.getpid()),
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        assert self._process.stdout is not None
        pipe = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(pipe), os.fdopen(reading, "rb")
        )
        self._readers = [
            asyncio.create_task(_lines(self._process.stdout, self._take_output)),
            asyncio.create_task(_lines(pipe, self._take_message)),
        ]

    async def wait(self) -> int:
        """Returns its exit code once it has ended and what it wrote has been read."""
        code = await self._ended()
        # Descendants that still run hold the pipes open; what they have to say is of no interest any more.
        await asyncio.wait(self._readers, timeout=1.0)
        for reader in self._readers:
            reader.cancel()
        return code

    async def stop(self, grace_s: float) -> None:
        """Asks it to end, and kills what is left of it and its descendants after `grace_s` seconds."""
        if self._process is None:
            return
        family = _descendants(self._process.pid)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended(), grace_s)
        await self.clear_away(family)

    async def clear_away(self, family: Sequence[int] = ()) -> None:
        """Kills the child and its descendants, also those whose own parents have ended, and waits until they are gone:
        only then are memory and ports free."""
        assert self._process is not None
        for _ in range(CLEAR_TRIES):
            # Orphans are adopted by this process, so they are found as its own descendants.
            suspects = {*_descendants(os.getpid()), *family} - {*self._strangers, self._process.pid}
            left = [pid for pid in suspects if not _gone(pid)]
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self.signal(signal.SIGKILL)
            if not left and self._process.returncode is not None:
                return
            await asyncio.sleep(0.02)
        logger.error("vLLM-HI: processes of the engine do not end: %s", left)

    async def _ended(self) -> int:
        # asyncio's own wait() may also wait for the pipes, which descendants hold open.
        assert self._process is not None
        while self._process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return self._process.returncode

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _take_output(self, line: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.buffer.write(line + b"\n")
            sys.stdout.buffer.flush()
        self._on_line(line.decode(errors="replace"))

    def _take_message(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict):
            self._on_message(message)


async def _lines(stream: asyncio.StreamReader, take: Callable[[bytes], None]) -> None:
    """Progress bars end their lines with a carriage return only, and lines may be longer than any limit."""
    rest = b""
    while data := await stream.read(65536):
        *whole, rest = _LINE_ENDS.split(rest + data)
        for line in whole:
            _safely(take, line)
        rest = rest[-65536:]
    if rest:
        _safely(take, rest)


def _safely(take: Callable[[bytes], None], line: bytes) -> None:
    if not line:
        return
    try:
        take(line)
    except Exception:
        # A reader that ended would fill the pipe and stop the engine.
        logger.exception("vLLM-HI: a line of the engine could not be read")


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent has ended, so that it can clear them away."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _gone(pid: int) -> bool:
    """True also for one that has ended and is only listed; clears it away if it was adopted."""
    try:
        if _fields(pid)[0] != "Z":
            return False
    except OSError:
        return True
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return True


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int(_fields(int(entry.name))[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _fields(pid: int) -> list[str]:
    """State, parent and so on: what follows the name in parentheses."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
