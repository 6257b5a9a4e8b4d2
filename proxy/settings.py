"""What a proxy worker needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_plugin.states import ORPHAN_S, PATIENCE_S

__all__ = ["ProxySettings"]


@dataclass(frozen=True)
class ProxySettings:
    """Settings of one proxy worker.

    Attributes:
        redis_url: where the routing table is; the proxy serves with what it has when Redis is lost.
        join_token: shared secret of the control connections.
        worker_id: name of this process; unique among the workers, at most 64 characters, no slash.
        key_prefix: prefix of all Redis keys and channels.
        poll_s: how often the routing table is read even without a notice, in seconds.
        patience_s: how long a frozen stream may stay silent before its second leg is given up, in seconds.
        orphan_patience_s: the same when the first leg is lost, so that giving up is the end of the answer.
        connect_timeout_s: for a TCP connection to an instance, in seconds.
        retry_after_s: what a client is told when no instance can take its request, in seconds.
        max_body_bytes: largest request body that is accepted.
        max_buffered_bytes: how much of one streamed answer waits in this process for a slow client.
    """

    redis_url: str
    join_token: str
    worker_id: str
    key_prefix: str = "vllm_hi:"
    poll_s: float = 1.0
    patience_s: float = PATIENCE_S
    orphan_patience_s: float = ORPHAN_S
    connect_timeout_s: float = 2.0
    retry_after_s: int = 2
    max_body_bytes: int = 64 * 1024 * 1024
    max_buffered_bytes: int = 256 * 1024

    def __post_init__(self) -> None:
        if not self.join_token:
            raise ValueError("join_token is empty: set VLLM_HI_TOKEN to the token that the instances use")
        if not self.worker_id or "/" in self.worker_id or len(self.worker_id) > 64:
            raise ValueError("worker_id must have 1 to 64 characters and no slash")
