"""What the environment says about this instance.

The flags of `vllm serve` (flags.py) write their values into the environment, so every vLLM process reads the same ones.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

__all__ = ["PluginSettings", "migration_requested", "nap_seconds"]

InstanceType = Literal["A", "B"]
StandbyKind = Literal["cold", "warm"]
#: `tcp_shm`: on one host the target reads the source's memory, between hosts TCP. `tcp`: TCP everywhere. `cuda_ipc`:
#: the target reads the source's GPU memory. `rdma`: NIXL.
TRANSFER_BACKENDS = ("tcp_shm", "tcp", "cuda_ipc", "rdma")

_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def migration_requested(environ: Mapping[str, str] = os.environ) -> bool:
    """True where the operator asked for this plugin at all; without that it changes nothing."""
    return bool(environ.get("VLLM_HI_TYPE"))


def nap_seconds(environ: Mapping[str, str] = os.environ) -> float:
    """`VLLM_HI_NAP_US` in seconds. Raises ValueError: names the variable and the remedy."""
    return _integer(environ, "VLLM_HI_NAP_US", 0, 0, 10_000) / 1e6


@dataclass(frozen=True)
class PluginSettings:
    """Settings of one instance.

    Attributes:
        instance_type: role at the start: A serves, B is a standby.
        host, port: address of the panel.
        token: join token; authenticates HTTP, control and data connections.
        data_port, control_port: TCP ports to listen on; 0 = any free port.
        bind: address that the data and control listeners bind to and that is advertised to the others.
        transfer_backend: None = chosen automatically.
        transfer_bytes_per_s: limit for copying KV while requests are decoded, per worker.
        staging_bytes: host memory for KV blocks of requests that move here before there is room; 0 = none.
        request_filter: `module.Class` of a request filter, or None.
        nap_s: how long vLLM's processes sleep between two looks when they wait for each other; 0 = they do not sleep.
        max_incr_rounds, incr_stall_rounds: stop rules of the rounds, counts.
        enable_faults: test switch, opens `POST /vllm_hi/faults`.
        standby: what it is as a standby: `cold` without an engine, `warm` with one. None: as a B it starts cold, and an
            engine that has been brought up stays.
    """

    instance_type: InstanceType
    host: str
    port: int
    token: str = field(repr=False)
    data_port: int = 0
    control_port: int = 0
    bind: str = "127.0.0.1"
    transfer_backend: str | None = None
    transfer_bytes_per_s: float = 1.5e9
    staging_bytes: int = 256 * 1024**2
    request_filter: str | None = None
    nap_s: float = 0.0
    max_incr_rounds: int = 8
    incr_stall_rounds: int = 2
    enable_faults: bool = False
    standby: StandbyKind | None = None

    @property
    def panel_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def has_standby_process(self) -> bool:
        """Whether the engine is run by a standby process (vllm_plugin/standby.py)."""
        return self.standby == "cold" or (self.instance_type == "B" and self.standby is None)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> PluginSettings:
        """Reads the `VLLM_HI_*` variables.

        Raises:
            ValueError: names the variable and the remedy.
        """
        instance_type = environ.get("VLLM_HI_TYPE", "").upper()
        if instance_type not in ("A", "B"):
            raise ValueError(f"VLLM_HI_TYPE (--vllm-hi-type) is {instance_type!r}: set it to A (serves) or B (standby)")
        token = environ.get("VLLM_HI_TOKEN", "")
        if not token:
            raise ValueError("VLLM_HI_TOKEN is not set: give this instance the join token of the panel")
        host, port = _host_and_port(environ.get("VLLM_HI_HOST", ""))
        backend = environ.get("VLLM_HI_TRANSFER_BACKEND") or None
        if backend not in (None, *TRANSFER_BACKENDS):
            known = " or ".join(TRANSFER_BACKENDS)
            raise ValueError(f"VLLM_HI_TRANSFER_BACKEND is {backend!r}: set it to {known}, or unset it")
        request_filter = environ.get("VLLM_HI_REQUEST_FILTER") or None
        if request_filter and not _CLASS_PATH.fullmatch(request_filter):
            raise ValueError(f"VLLM_HI_REQUEST_FILTER is {request_filter!r}: write it as module.Class")
        standby = environ.get("VLLM_HI_STANDBY") or None
        if standby not in (None, "cold", "warm"):
            raise ValueError(f"VLLM_HI_STANDBY (--vllm-hi-standby) is {standby!r}: set it to cold or warm, or unset it")
        return cls(
            instance_type=cast(InstanceType, instance_type),
            host=host,
            port=port,
            token=token,
            data_port=_integer(environ, "VLLM_HI_DATA_PORT", 0, 0, 65535),
            control_port=_integer(environ, "VLLM_HI_CONTROL_PORT", 0, 0, 65535),
            bind=_bind_address(environ.get("VLLM_HI_BIND", ""), host, port),
            transfer_backend=backend,
            transfer_bytes_per_s=1e6 * _integer(environ, "VLLM_HI_TRANSFER_MB_PER_S", 1500, 1, 1_000_000),
            staging_bytes=1024**2 * _integer(environ, "VLLM_HI_STAGING_MB", 256, 0, 1_000_000),
            request_filter=request_filter,
            nap_s=nap_seconds(environ),
            max_incr_rounds=_integer(environ, "VLLM_HI_MAX_INCR_ROUNDS", 8, 1, 1000),
            incr_stall_rounds=_integer(environ, "VLLM_HI_INCR_STALL_ROUNDS", 2, 1, 1000),
            enable_faults=environ.get("VLLM_HI_ENABLE_FAULTS", "") == "1",
            standby=cast(StandbyKind | None, standby),
        )


def _host_and_port(text: str) -> tuple[str, int]:
    remedy = "set it to the panel's address as ip:port, for example 127.0.0.1:8002"
    if not text:
        raise ValueError(f"VLLM_HI_HOST (--vllm-hi-host) is not set: {remedy}")
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"VLLM_HI_HOST (--vllm-hi-host) is {text!r}: {remedy}")
    return host, int(port)


def _integer(environ: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ValueError(f"{name} is {text!r}: set it to a whole number from {low} to {high}")
    return int(text)


def _bind_address(text: str, host: str, port: int) -> str:
    """Returns an address that others can dial: the configured one, else that of the interface that faces the panel."""
    if text:
        try:
            address = ipaddress.ip_address(text)
        except ValueError as error:
            raise ValueError(f"VLLM_HI_BIND is {text!r}: set it to an IP address of this machine") from error
        if address.is_unspecified:
            raise ValueError(f"VLLM_HI_BIND is {text!r}: it is also advertised to the others; name one address")
        return text
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ValueError(f"VLLM_HI_HOST names {host!r}, which does not resolve: use an IP address") from error
    family, kind, protocol, _, target = candidates[0]
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.connect(target)  # UDP: picks the route, sends nothing.
            return str(probe.getsockname()[0])
        except OSError as error:
            raise ValueError(
                f"no interface reaches VLLM_HI_HOST {host!r}: set VLLM_HI_BIND to an IP address of this machine"
            ) from error
