"""The proxy in a process of its own: a real uvicorn, which must serve without Django."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import httpx


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_it_serves_v1_and_nothing_else() -> None:
    port = free_port()
    environment = {**os.environ, "VLLM_HI_TOKEN": "join-token", "REDIS_URL": "redis://127.0.0.1:6379/9"}
    command = [sys.executable, "-m", "uvicorn", "proxy.asgi:application", "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen(command, env=environment)
    try:
        for _ in range(200):
            try:
                models = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5)
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        assert models.json()["object"] == "list"
        assert httpx.get(f"http://127.0.0.1:{port}/admin/", timeout=5).status_code == 404
    finally:
        process.terminate()
        assert process.wait(20) is not None


def test_without_a_token_it_does_not_start_and_says_why() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_HI_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-c", "import proxy.asgi"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "VLLM_HI_TOKEN" in done.stderr


def test_it_needs_no_django() -> None:
    code = "import sys, proxy.asgi; sys.exit(any(name.split('.')[0] == 'django' for name in sys.modules))"
    environment = {**os.environ, "VLLM_HI_TOKEN": "join-token"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
