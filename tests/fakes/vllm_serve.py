"""Plays `vllm serve` for a standby: writes its log lines, listens on its port, and says so to who started it.

    python vllm_serve.py BEHAVIOUR PORT [options that a standby appends]

`BEHAVIOUR`: `serves`, `no_model`, `no_memory`, `killed`, `hangs`, `stubborn` (serves, and does not mind SIGTERM),
`with_family` (hangs, with a process of its own that minds nothing).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

START = (
    "(APIServer pid=1) INFO 11-30 22:25:36 [api_utils.py:286] non-default args: {'model_tag': 'x'}",
    "(EngineCore pid=2) INFO 11-30 22:25:45 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: …",
    "(Worker pid=3) INFO 11-30 22:25:54 [cpu_model_runner.py:68] Starting to load model x...",
)
REST = (
    "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<?, ?it/s]",
    "(Worker pid=3) INFO 11-30 22:25:55 [default_loader.py:501] Loading weights took 0.63 seconds",
    "(EngineCore pid=2) INFO 11-30 22:25:56 [kv_cache_utils.py:2327] CPU KV cache size: 58,880 tokens",
    "(EngineCore pid=2) INFO 11-30 22:25:59 [core.py:402] init engine (profile, create kv cache) took 3 s",
)
NO_MODEL = (
    "(APIServer pid=1) Traceback (most recent call last):",
    "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
    "(APIServer pid=1)   Value error, Invalid repository ID or local directory specified: '/no/model'. [type=value]",
)
NO_MEMORY = (
    "(Worker pid=3) ERROR 11-30 22:25:54 [multiproc.py:1] ValueError: Free memory on device cuda:0 (1.0/80.0 GiB) on "
    "startup is less than desired GPU memory utilization (0.9, 72.0 GiB).",
    "(EngineCore pid=2) Exception: WorkerProc initialization failed due to an exception in a background process.",
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
)


class _Engine(ThreadingHTTPServer):
    allow_reuse_port = True
    daemon_threads = True


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answers with the command line; `/say/EVENT` tells the standby, `/die` ends it as a crash does."""
        body = json.dumps({"arguments": sys.argv[3:], "environment": dict(os.environ), "pid": os.getpid()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        if self.path.startswith("/say/"):
            _say(self.path.removeprefix("/say/"))
        elif self.path == "/die":
            _write("RuntimeError: the device is on fire")
            os._exit(7)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def _write(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _say(event: str) -> None:
    os.write(int(os.environ["VLLM_HI_STANDBY_PIPE"]), json.dumps({"event": event}).encode() + b"\n")


def main(behaviour: str, port: int) -> None:
    _write(*START)
    if behaviour in ("no_model", "no_memory"):
        _write(*(NO_MODEL if behaviour == "no_model" else NO_MEMORY))
        sys.exit(1)
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "with_family":
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
        subprocess.Popen([sys.executable, "-c", code])
    if behaviour in ("hangs", "with_family"):
        time.sleep(300)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _write(*REST)
    server = _Engine(("127.0.0.1", port), _Handler)
    _say("listening")
    _say("registered")
    server.serve_forever(poll_interval=0.02)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
