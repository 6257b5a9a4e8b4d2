"""An instance that speaks section 4 of the protocol over real HTTP and can be told to fail at any call.

It moves no bytes: blocks come from a list, requests are rows. What the panel sees is what it would see of a real one.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from vllm_plugin.wire import PROTOCOL_VERSION

TOKEN = "join-token-for-tests"
FACTORS = {"vllm_version": "0.32.0", "model": "smollm2", "dtype": "float32", "block_size": 16, "max_model_len": 2048}

Body = dict[str, Any]


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str = "It says no.") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Dead(Exception):
    """The process is gone: the connection breaks without an answer."""


class FakeInstance:
    """`rounds`: blocks that the rounds send, the last one repeated. `faults`: call name -> what happens there, called
    with the body before the call is carried out; it raises, or sleeps, or does nothing."""

    def __init__(self, vllm_hi_id: str, role: str) -> None:
        self.vllm_hi_id = vllm_hi_id
        self.role = role
        self.peer: FakeInstance | None = None
        self.requests: dict[str, Body] = {}
        self.attached: set[str] = set()
        self.rounds = [40, 6, 1]
        self.rounds_done = 0
        self.factors: Body = dict(FACTORS)
        self.faults: dict[str, Callable[[Body], None]] = {}
        self.calls: list[tuple[str, Body]] = []
        self.seen_attempt: dict[str, int] = defaultdict(int)
        self.destroyed = False
        self.stopped = False
        #: Size of its KV cache; what its requests hold is not free.
        self.total_blocks = 1000
        self.run_slots = 256
        #: Host memory for requests that come before there is room.
        self.staging_blocks = 0
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Also what a killed process looks like from outside: nobody listens any more."""
        # Connections that are kept alive are threads of their own, which outlive the server.
        self.stopped = True
        self._server.shutdown()
        self._server.server_close()

    def die(self, _body: Body | None = None) -> None:
        """As a fault: dies while the call is under way."""
        threading.Thread(target=self.stop).start()
        while not getattr(self._server, "_BaseServer__is_shut_down").is_set():  # noqa: B009
            time.sleep(0.005)
        raise Dead

    def add_request(
        self, request_id: str, blocks: int = 5, reason: tuple[str, str] | None = None, age_s: float = 1.0
    ) -> None:
        self.requests[request_id] = {
            "request_id": request_id,
            "stream_id": f"s-{request_id}",
            "proxy": "w1",
            "status": "running",
            "prompt_tokens": 64,
            "output_tokens": 16,
            "kv_blocks": blocks,
            "age_s": age_s,
            "migratable": reason is None,
            "reason": {"code": reason[0], "message": reason[1]} if reason else None,
        }

    def named(self, name: str) -> list[Body]:
        return [body for call, body in self.calls if call == name]

    def answer(self, name: str, body: Body) -> Body:
        if self.stopped:
            raise Dead
        with self._lock:
            self.calls.append((name, body))
        if name in self.faults:
            self.faults[name](body)
        if "job" in body:
            if body["attempt"] < self.seen_attempt[body["job"]]:
                raise Refusal(409, "stale_attempt", "A later attempt was seen.")
            self.seen_attempt[body["job"]] = body["attempt"]
        method: Callable[[Body], Body] = getattr(self, f"do_{name}")
        return method(body)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def do_status(self, _: Body) -> Body:
        return {
            "vllm_hi_id": self.vllm_hi_id,
            "protocol_version": PROTOCOL_VERSION,
            "role": self.role,
            "migration": {"supported": True, "missing_probes": []},
            "factors": self.factors,
            "kv": {
                "total_blocks": self.total_blocks,
                "free_blocks": self.total_blocks - sum(row["kv_blocks"] for row in self.requests.values()),
                "block_size": 16,
                "bytes_per_block": 1024,
            },
            "requests": {
                "running": len(self.requests),
                "waiting": 0,
                "parked": 0,
                "frozen": 0,
                "run_slots": self.run_slots,
            },
            "control_port": 9100,
            "data_host": "127.0.0.1",
            "data_ports": [9200],
        }

    def do_requests(self, _: Body) -> Body:
        return {"requests": list(self.requests.values())}

    def do_probe(self, body: Body) -> Body:
        assert self.peer is not None and body["data_ports"] == [9200]
        return {"transport": "memory", "reason": "", "bytes_per_s": 5_000_000_000, "block_s": 1e-5}

    def do_start(self, body: Body) -> Body:
        assert self.peer is not None
        assert body["peer"]["vllm_hi_id"] == self.peer.vllm_hi_id
        return {"session": "x"}

    def do_attach(self, body: Body) -> Body:
        attached, refused = [], []
        for request_id in body["request_ids"]:
            row = self.requests.get(request_id)
            if row is None:
                refused.append({"request_id": request_id, "code": "unknown_request", "message": "It has ended."})
            else:
                self.attached.add(request_id)
                names = ("request_id", "stream_id", "prompt_tokens", "output_tokens", "kv_blocks")
                attached.append({name: row[name] for name in names} | {"ticket": "t"})
        return {"attached": attached, "refused": refused}

    def do_round(self, body: Body) -> Body:
        blocks = self.rounds[min(self.rounds_done, len(self.rounds) - 1)]
        self.rounds_done += 1
        return {
            "round": body["round"],
            "blocks": blocks,
            "bytes": blocks * 1024,
            "hit_blocks": 0,
            "dirty_blocks": 2,
            "duration_s": 0.01,
            "attached": len(self.attached),
            "finished": [],
            "failed": [],
        }

    def do_handover(self, body: Body) -> Body:
        assert self.peer is not None
        results = []
        for request_id in body["request_ids"]:
            self.attached.discard(request_id)
            if request_id not in self.requests:
                results.append({"request_id": request_id, "outcome": "finished"})
                continue
            if body["mode"] == "staged" and not self._stage(request_id):
                full = {"code": "target_out_of_staging", "message": "The target has no staging blocks free."}
                results.append({"request_id": request_id, "outcome": "stayed", **full})
                continue
            row = self.requests.pop(request_id)
            queued = body["mode"] in ("queued", "staged")
            # What waits in a queue holds no blocks.
            self.peer.requests[request_id] = row | {"kv_blocks": 0} if queued else row
            results.append(
                {
                    "request_id": request_id,
                    "stream_id": row["stream_id"],
                    "outcome": "moved",
                    "code": "",
                    "message": "",
                    "tokens": 33,
                    "tail_blocks": 1,
                    "tail_bytes": 1024,
                    "gap_ms": 42.0,
                    "itl_ms": 21.0,
                    "stages": {"freeze": 1.0},
                    "recomputed": body["mode"] in ("recompute", "queued"),
                    "staged": body["mode"] == "staged",
                }
            )
        return {"results": results}

    def _stage(self, request_id: str) -> bool:
        assert self.peer is not None
        blocks = self.requests[request_id]["kv_blocks"]
        fits: bool = self.peer.staging_blocks >= blocks
        self.peer.staging_blocks -= blocks * fits
        return fits

    def do_lease(self, body: Body) -> Body:
        return {"expires_in_s": body["lease_s"]}

    def do_finish(self, _: Body) -> Body:
        return {"moved": 0, "stayed": 0}

    def do_abort(self, _: Body) -> Body:
        released = len(self.attached)
        self.attached.clear()
        return {"released": released}

    def do_activate(self, _: Body) -> Body:
        self.role = "active"
        return {"role": "active"}

    def do_convert_to_b(self, _: Body) -> Body:
        if self.requests:
            raise Refusal(409, "requests_in_flight", "It still has requests.")
        self.role = "standby"
        return {"role": "standby"}

    def do_destroy(self, _: Body) -> Body:
        self.destroyed = True
        return {"role": "destroyed"}


class _Handler(BaseHTTPRequestHandler):
    fake: FakeInstance
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _serve(self, body: Body) -> None:
        try:
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                raise Refusal(401, "wrong_token")
            status, answer = 200, self.fake.answer(self.path.rsplit("/", 1)[1], body)
        except Refusal as refusal:
            status = refusal.status
            answer = {"error": {"code": refusal.code, "message": refusal.message, "param": None}}
        except Dead:
            self.close_connection = True
            return
        data = json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            # The caller's patience was shorter than ours.
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""
