"""Children of the supervisor: they end with it, with their own children, and a busy port is stepped over."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controlplane.processes import ManagedProcess, ProcessFailed, choose_port, stop_all

#: Ignores SIGTERM and has a child that does too: only killing the family ends both.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    print("child", os.getpid(), flush=True)
time.sleep(600)
"""


def _process(tmp_path: Path, script: str, name: str = "part") -> ManagedProcess:
    command = [sys.executable, "-u", "-c", script]
    return ManagedProcess(name, command, dict(os.environ), tmp_path / f"{name}.log", tmp_path)


async def _until(condition: object, limit_s: float = 20) -> None:
    assert callable(condition)
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "never became true"
        await asyncio.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


async def test_stopping_takes_stubborn_grandchildren_along(tmp_path: Path) -> None:
    process = _process(tmp_path, STUBBORN)
    await process.start()
    await _until(lambda: "child" in process.tail())
    grandchild = int(process.tail().split()[1])

    await stop_all([process], grace_s=0.2)

    assert not process.running
    await _until(lambda: not _alive(grandchild))


async def test_a_polite_child_is_given_time_to_say_goodbye(tmp_path: Path) -> None:
    script = "import signal,sys,time\nsignal.signal(15, lambda *_: (print('bye', flush=True), sys.exit(0)))\n"
    process = _process(tmp_path, script + "print('up', flush=True)\ntime.sleep(600)")
    await process.start()
    await _until(lambda: "up" in process.tail())

    await stop_all([process], grace_s=20)

    assert "bye" in process.tail()
    assert await process.wait() == 0


async def test_an_end_is_explained_with_the_last_log_lines(tmp_path: Path) -> None:
    process = _process(tmp_path, "print('the disk is full'); raise SystemExit(3)", "worker")
    await process.start()
    assert await process.wait() == 3

    text = str(process.failure())

    assert "worker ended with code 3" in text
    assert "the disk is full" in text
    assert str(tmp_path / "worker.log") in text


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    process = ManagedProcess("panel", ["/no/such/program"], {}, tmp_path / "panel.log", tmp_path)
    with pytest.raises(ProcessFailed, match="panel cannot be started"):
        await process.start()


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, sys
from pathlib import Path
from controlplane.processes import ManagedProcess
async def main():
    log = Path({str(tmp_path)!r}) / "child.log"
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = ManagedProcess("child", command, dict(os.environ), log, log.parent)
    await child.start()
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout
    with supervisor.stdout:
        child = int(supervisor.stdout.readline())
        assert _alive(child)
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait()
    asyncio.run(_until(lambda: not _alive(child)))


def test_a_busy_port_is_stepped_over() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        if port > 65000:
            pytest.fail("no room above the port that the system gave")
        taken: set[int] = set()
        first = choose_port(port, taken)
        second = choose_port(port, taken)
    assert port < first < second
    assert taken == {first, second}


def test_no_free_port_is_said() -> None:
    with pytest.raises(ProcessFailed, match="no port from 70000"):
        choose_port(70000, set())
