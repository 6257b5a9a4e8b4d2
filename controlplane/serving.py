"""How the supervisor starts `vllm serve`: the same flags and variables that anybody would give it by hand."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from controlplane.preparation import cores
from controlplane.processes import ManagedProcess, ProcessFailed

__all__ = ["HOST", "Instance", "InstanceOptions", "serve_command", "serve_environment"]

HOST = "127.0.0.1"
#: With fewer cores, those of two instances' processes that only wait take them from those that compute.
ROOMY = 8


@dataclass(frozen=True)
class InstanceOptions:
    """How the two instances are started.

    Attributes:
        model: folder or name of the model.
        served_model_name: the name clients use.
        dtype: float32 gives token-exact comparisons under load; bfloat16 is faster (docs in README.md).
        kv_cache_bytes: KV cache of each instance.
        max_num_seqs, max_model_len: limits of each instance, requests and tokens.
        staging_mb: host memory for requests that arrive before there is room; None = as the plugin has it.
        faults: opens the test switch that breaks migrations on purpose.
        standby: `--vllm-hi-standby` of both: warm instances can be moved to at once. None leaves it out.
        arguments: appended to `vllm serve`.
    """

    model: str
    served_model_name: str = "smollm2-135m"
    dtype: str = "float32"
    kv_cache_bytes: int = 768 * 1024**2
    max_num_seqs: int = 16
    max_model_len: int = 2048
    staging_mb: int | None = None
    faults: bool = False
    standby: str | None = "warm"
    arguments: tuple[str, ...] = ()


@dataclass
class Instance:
    """One `vllm serve` process of ours. `id` is known once it has registered."""

    letter: str
    port: int
    data_port: int
    process: ManagedProcess
    id: str = ""

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}"


def serve_command(options: InstanceOptions, letter: str, port: int, panel: str, data_port: int) -> list[str]:
    """The command line of instance A or B; `panel` is host:port."""
    vllm = shutil.which("vllm", path=str(Path(sys.executable).parent)) or "vllm"
    command = [vllm, "serve", options.model, "--host", HOST, "--port", str(port)]
    command += ["--served-model-name", options.served_model_name, "--dtype", options.dtype]
    command += ["--max-model-len", str(options.max_model_len), "--max-num-seqs", str(options.max_num_seqs)]
    # vLLM's CPU build fails when a seeded request's prompt is split over several steps: leave room for all at once.
    command += ["--max-num-batched-tokens", str(options.max_num_seqs * options.max_model_len)]
    if runs_on_cpu():
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(options.kv_cache_bytes)]
    else:
        command += ["--gpu-memory-utilization", "0.4"]
    command += ["--vllm-hi-type", letter, "--vllm-hi-host", panel, "--vllm-hi-data-port", str(data_port)]
    if options.standby:
        command += ["--vllm-hi-standby", options.standby]
    return [*command, *options.arguments]


def serve_environment(options: InstanceOptions, index: int, join_token: str) -> dict[str, str]:
    """What instance 0 (A) or 1 (B) needs in its environment beside the inherited one."""
    environment = {"VLLM_HI_TOKEN": join_token, "VLLM_NO_USAGE_STATS": "1"}
    if Path(options.model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if runs_on_cpu():
        environment["VLLM_CPU_OMP_THREADS_BIND"] = cores_of_instance(index)
        if len(cores()) < ROOMY:
            environment["VLLM_HI_NAP_US"] = "1000"
    if options.staging_mb is not None:
        environment["VLLM_HI_STAGING_MB"] = str(options.staging_mb)
    if options.faults:
        environment["VLLM_HI_ENABLE_FAULTS"] = "1"
    return environment


def runs_on_cpu() -> bool:
    """True where the installed vLLM is the CPU build."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError as error:
        raise ProcessFailed("vLLM is not installed in this environment: run `make install`.") from error


def cores_of_instance(index: int) -> str:
    """Cores for instance 0 or 1, as VLLM_CPU_OMP_THREADS_BIND wants them.

    Both get the same number, at most four: different numbers of threads would round differently. On a small machine the
    panel shares their cores.
    """
    usable = cores()
    share = max(1, min(4, len(usable) // 2))
    first = index * share if len(usable) > 1 else 0
    return ",".join(str(core) for core in usable[first : first + share])
