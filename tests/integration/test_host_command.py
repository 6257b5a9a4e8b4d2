"""`vllm-hi host` as an operator runs it: real processes, from the first line of progress to the last orphan."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.timeout(300)

START_S = 200


def _command(state_dir: Path, port: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "VLLM_HI_STATE_DIR": str(state_dir)}
    for name in ("REDIS_URL", "DATABASE_URL", "VLLM_HI_TOKEN", "CELERY_BROKER_URL", "DJANGO_SETTINGS_MODULE"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "controlplane.cli", "host", "--port", str(port)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _processes_that_mention(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in environment:
                found.append(entry.name)
    return found


def _until_ready(state_dir: Path, process: subprocess.Popen[str]) -> dict[str, str]:
    credentials = state_dir / "credentials.json"
    end = time.monotonic() + START_S
    while not credentials.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "not ready in time"
        time.sleep(0.2)
    account: dict[str, str] = json.loads(credentials.read_text())
    return account


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        yield busy.getsockname()[1]


def test_the_control_plane_comes_up_on_a_free_port_and_leaves_nothing_behind(tmp_path: Path, busy_port: int) -> None:
    state_dir = tmp_path / "state"
    process = _command(state_dir, busy_port)
    try:
        account = _until_ready(state_dir, process)
        assert stat.S_IMODE((state_dir / "credentials.json").stat().st_mode) == 0o600
        assert set(account) == {"url", "username", "password", "api_token"}

        with httpx.Client(base_url=account["url"], trust_env=False) as client:
            assert client.get("/readyz").status_code == 200
            assert client.get("/api/v1/instances").status_code == 401
            bearer = {"Authorization": f"Bearer {account['api_token']}"}
            assert client.get("/api/v1/instances", headers=bearer).status_code == 200
            assert client.get("/vllm_hi/status", headers=bearer).json()["instances"] == 0
            assert client.get("/v1/models").json()["data"] == []

        second = _command(state_dir, busy_port)
        assert "is in use by another run" in second.communicate(timeout=60)[0]
        assert second.returncode == 1
    finally:
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert f"Port {busy_port} is busy" in output
    assert _processes_that_mention(state_dir) == []


def test_a_killed_supervisor_takes_its_children_along(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    process = _command(state_dir, 8062)
    try:
        _until_ready(state_dir, process)
        assert len(_processes_that_mention(state_dir)) >= 4
    finally:
        process.kill()
        process.communicate()
    end = time.monotonic() + 60
    while left := _processes_that_mention(state_dir):
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.2)
