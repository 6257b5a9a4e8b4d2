"""The panel's side of an instance's HTTP endpoints (docs/protocol.md, section 4).

Every failure, whether of the network or an answer of the instance, becomes one exception with a code and a sentence.
Nothing is retried here: the callers know which calls may be repeated.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import httpx
from django.conf import settings

from instances.models import Instance

__all__ = ["InstanceClient", "InstanceError"]

CONNECT_TIMEOUT_S = 2.0
#: Seconds per call. A round copies all that became ready, a handover waits for the client's first token.
TIMEOUTS = {
    "status": 5.0,
    "requests": 5.0,
    "probe": 20.0,
    "instantiate": 10.0,
    "start": 10.0,
    "attach": 30.0,
    "round": 120.0,
    "handover": 60.0,
    "lease": 5.0,
    "finish": 10.0,
    "abort": 10.0,
    "activate": 5.0,
    "convert_to_b": 5.0,
    "destroy": 5.0,
}
#: Longest text of a foreign error message that is kept.
MAX_MESSAGE = 500


class InstanceError(Exception):
    """A call failed.

    `code` is the instance's own, or `unreachable` (no connection), `no_answer` (it stopped answering) or `bad_answer`.
    `status` is the HTTP status, None without an answer.
    """

    def __init__(self, instance: str, address: str, code: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.instance = instance
        self.address = address
        self.code = code
        self.message = message
        self.status = status

    @property
    def gone(self) -> bool:
        """True if the instance itself seems to be away, as opposed to having refused."""
        return self.status is None


class InstanceClient:
    """Calls one instance. Not thread-safe; use one per thread, as a context manager."""

    def __init__(
        self, vllm_hi_id: str, base_url: str, token: str, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.vllm_hi_id = vllm_hi_id
        self.address = base_url.removeprefix("http://")
        self._http = httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {token}"},
            transport=transport,
            # No proxy from the environment between parts of one product.
            trust_env=False,
        )

    @classmethod
    def of(cls, instance: Instance, transport: httpx.BaseTransport | None = None) -> Self:
        return cls(instance.vllm_hi_id, instance.base_url, settings.VLLM_HI_TOKEN, transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def status(self) -> dict[str, Any]:
        return self._call("GET", "/vllm_hi/status", "status")

    def requests(self) -> list[dict[str, Any]]:
        """Requests in flight, as the instance lists them."""
        rows = self._call("GET", "/vllm_hi/requests", "requests").get("requests")
        if not isinstance(rows, list):
            raise self._error("bad_answer", "answered without a list of requests")
        return rows

    def probe(self, host: str, data_ports: list[int]) -> dict[str, Any]:
        """How fast KV would travel to another instance: `{transport, reason, bytes_per_s, block_s}`."""
        return self._migration("probe", {"host": host, "data_ports": data_ports})

    def instantiate(self, job: str, attempt: int, wish: dict[str, Any]) -> dict[str, Any]:
        """Asks a standby to bring its engine up; how far it is, is in its `status`."""
        return self._migration("instantiate", {"job": job, "attempt": attempt, **wish})

    def start(self, job: str, attempt: int, peer: dict[str, Any], lease_s: float) -> dict[str, Any]:
        return self._migration("start", {"job": job, "attempt": attempt, "peer": peer, "lease_s": lease_s})

    def attach(self, job: str, attempt: int, request_ids: list[str] | None) -> dict[str, Any]:
        return self._migration("attach", {"job": job, "attempt": attempt, "request_ids": request_ids})

    def round(self, job: str, attempt: int, index: int, slow_source: bool = False) -> dict[str, Any]:
        body = {"job": job, "attempt": attempt, "round": index, "slow_source": slow_source}
        return self._migration("round", body)

    def handover(
        self, job: str, attempt: int, request_ids: list[str] | None, wave: int, mode: str = "rolling"
    ) -> dict[str, Any]:
        body = {"job": job, "attempt": attempt, "request_ids": request_ids, "wave": wave, "mode": mode}
        return self._migration("handover", body)

    def lease(self, job: str, attempt: int, lease_s: float) -> dict[str, Any]:
        return self._migration("lease", {"job": job, "attempt": attempt, "lease_s": lease_s})

    def finish(self, job: str, attempt: int) -> dict[str, Any]:
        return self._migration("finish", {"job": job, "attempt": attempt})

    def abort(self, job: str, attempt: int) -> dict[str, Any]:
        return self._migration("abort", {"job": job, "attempt": attempt})

    def activate(self, job: str, attempt: int) -> dict[str, Any]:
        return self._migration("activate", {"job": job, "attempt": attempt})

    def convert_to_b(self, job: str, attempt: int) -> dict[str, Any]:
        return self._migration("convert_to_b", {"job": job, "attempt": attempt})

    def destroy(self, job: str, attempt: int) -> dict[str, Any]:
        return self._migration("destroy", {"job": job, "attempt": attempt})

    def _migration(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", f"/vllm_hi/migration/{name}", name, body)

    def _call(self, method: str, path: str, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        timeout = httpx.Timeout(TIMEOUTS[name], connect=CONNECT_TIMEOUT_S)
        try:
            response = self._http.request(method, path, json=body, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._error("unreachable", "does not accept connections") from error
        except httpx.HTTPError as error:
            raise self._error("no_answer", f"stopped answering during {name}") from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.is_success:
            if isinstance(answer, dict):
                return answer
            raise self._error("bad_answer", f"answered {name} with something that is not a JSON object")
        error_body = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(error_body, dict) and error_body.get("code"):
            message = str(error_body.get("message") or "")[:MAX_MESSAGE]
            raise InstanceError(
                self.vllm_hi_id, self.address, str(error_body["code"])[:64], message, response.status_code
            )
        raise self._error("bad_answer", f"answered {name} with status {response.status_code}", response.status_code)

    def _error(self, code: str, what: str, status: int | None = None) -> InstanceError:
        message = f"Instance {self.vllm_hi_id} ({self.address}) {what}."
        return InstanceError(self.vllm_hi_id, self.address, code, message, status)
