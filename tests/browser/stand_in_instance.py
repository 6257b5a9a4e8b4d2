"""An HTTP server that answers as an instance does when it is asked for its status and its requests."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from vllm_plugin.wire import PROTOCOL_VERSION

FACTORS = {
    "vllm_version": "0.32.0",
    "model": "SmolLM2-135M-Instruct",
    "dtype": "float32",
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "num_layers": 30,
    "num_kv_heads": 3,
    "head_size": 64,
    "max_model_len": 2048,
    "tensor_parallel_size": 1,
    "attention_backend": "CPU_ATTN",
}
PROBE = {"transport": "memory", "reason": "", "bytes_per_s": 6_400_000_000, "block_s": 1e-4}


class StandInInstance:
    """`status` and `requests` may be changed while it runs."""

    def __init__(self, vllm_hi_id: str, **factors: Any) -> None:
        self.status: dict[str, Any] = {
            "vllm_hi_id": vllm_hi_id,
            "protocol_version": PROTOCOL_VERSION,
            "plugin_version": "0.1.0",
            "served_model_name": "smollm2",
            "migration": {"supported": True, "missing_probes": []},
            "factors": {**FACTORS, **factors},
            "kv": {"total_blocks": 1024, "free_blocks": 800, "block_size": 16, "bytes_per_block": 737280},
            "requests": {"running": 2, "waiting": 0, "parked": 0, "frozen": 0},
            "session": None,
            "data_host": "127.0.0.1",
            "data_ports": [9200],
        }
        self.requests: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.do_GET()

            def do_GET(self) -> None:
                answers = {
                    "/vllm_hi/status": outer.status,
                    "/vllm_hi/requests": {"requests": outer.requests},
                    "/vllm_hi/migration/probe": PROBE,
                }
                body = json.dumps(answers[self.path]).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
