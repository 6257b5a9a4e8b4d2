"""Child processes that never outlive their supervisor, and ports for them.

Every child leads a process group of its own, so a Ctrl-C in the terminal reaches only the supervisor, and stopping a
child can take its whole family along: vLLM's engine and worker processes are grandchildren. It is no session of its
own: Linux shares out the processor by session (CONFIG_SCHED_AUTOGROUP), and where one of them computes all the time,
the threads of the others, however little they do, were seen to wait for half a second. If the supervisor itself is
killed, the kernel tells each child to end (PR_SET_PDEATHSIG, Linux).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vllm_plugin.parent_death import end_with

__all__ = ["ManagedProcess", "ProcessFailed", "adopt_orphans", "choose_port", "stop_all"]

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class ProcessFailed(RuntimeError):
    """A child could not be started, ended by itself, or was not ready in time; the text is for humans."""


class ManagedProcess:
    """One child with its log file.

    Args:
        name: what people call it; also the name of its log file.
        command: program and arguments.
        environment: its whole environment.
        log: file that takes its output; emptied at each start. None: it shares our terminal.
        folder: its working directory.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path | None, folder: Path
    ) -> None:
        self.name = name
        self.command = list(command)
        self.environment = dict(environment)
        self.log = log
        self.folder = folder
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts it.

        Raises:
            ProcessFailed: the program does not exist or may not be run.
        """
        output = self.log.open("wb") if self.log else None
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                env=self.environment,
                cwd=self.folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT if output else None,
                process_group=0,
                preexec_fn=end_with(os.getpid()),
            )
        except OSError as error:
            raise ProcessFailed(f"{self.name} cannot be started: {error}") from error
        finally:
            if output:
                output.close()

    async def wait(self) -> int:
        """Returns its exit code once it has ended."""
        if self._process is None:
            raise ProcessFailed(f"{self.name} was never started")
        return await self._process.wait()

    def failure(self) -> ProcessFailed:
        """What to tell a human about its end: exit code, last log lines, where the log is."""
        code = self._process.returncode if self._process else None
        text = f"{self.name} ended with code {code}"
        if self.log:
            text += f". Last lines of {self.log}:\n{self.tail()}"
        return ProcessFailed(text)

    def tail(self, lines: int = 15) -> str:
        """The last lines of its log."""
        if self.log is None or not self.log.exists():
            return ""
        text = self.log.read_bytes()[-16384:].decode(errors="replace")
        return "\n".join("    " + line for line in text.splitlines()[-lines:])

    def terminate(self) -> None:
        """Asks it to end; its own children are its business for now."""
        if self.running and self._process:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill_family(self) -> None:
        """Kills what is left of its process group at once, it included."""
        if self.pid is None:
            return
        # Twice: one may have been forking while we looked.
        for _ in range(2):
            for pid in _group_members(self.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def relatives(self) -> list[int]:
        """Processes of its group beside itself that still exist; clears away those that have ended and are ours."""
        if self.pid is None:
            return []
        return [pid for pid in _group_members(self.pid) if pid != self.pid and not _reaped(pid)]


async def stop_all(processes: Iterable[ManagedProcess], grace_s: float) -> None:
    """Asks all to end, waits at most `grace_s` seconds, then kills what is left of their families."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.terminate()
    waiting = [asyncio.ensure_future(process.wait()) for process in started]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=grace_s)
    finally:
        for process in started:
            process.kill_family()
    await asyncio.gather(*waiting)
    # Killed is not gone: memory and ports are free only when the kernel is done with them.
    for _ in range(100):
        if not any(process.relatives() for process in started):
            return
        await asyncio.sleep(0.02)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent has ended, so that it can clear them away."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def choose_port(preferred: int, taken: set[int], host: str = "127.0.0.1") -> int:
    """Returns `preferred` or the next free port after it, and adds it to `taken`.

    Raises:
        ProcessFailed: none of the next 100 ports is free.
    """
    for port in range(preferred, min(preferred + 100, 65536)):
        if port in taken:
            continue
        with socket.socket() as probe:
            # As servers do it: a port whose old connections are still fading away is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        taken.add(port)
        return port
    raise ProcessFailed(f"no port from {preferred} to {preferred + 99} is free on {host}")


def _reaped(pid: int) -> bool:
    """Clears away an ended grandchild that we have adopted; asyncio does so for our own children."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def _group_members(leader: int) -> list[int]:
    """Processes of the group that `leader` leads; on systems without /proc they are killed instead."""
    proc = Path("/proc")
    if not proc.is_dir():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
        return []
    members = []
    for entry in proc.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # After the name in parentheses: state, parent, group.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == leader:
            members.append(int(entry.name))
    return members
