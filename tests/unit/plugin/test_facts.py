"""What an instance says about itself is about the whole of it, however many ranks it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_plugin import facts
from vllm_plugin.compat import FullAttentionSpec
from vllm_plugin.compatibility import compare, refusal


class FullAttention(FullAttentionSpec):  # type: ignore[misc]
    """Made without the arguments that this release wants."""

    def __new__(cls) -> Any:
        return object.__new__(cls)

    def __init__(self) -> None:
        pass

    block_size = 128


def core(tp: int = 1, pp: int = 1, context: int = 1, attention: int = 8, kv: int = 4, mla: bool = False) -> Any:
    parallel = SimpleNamespace(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=1,
        decode_context_parallel_size=context,
        prefill_context_parallel_size=1,
    )
    model = SimpleNamespace(
        model="tiny",
        dtype="torch.float32",
        max_model_len=2048,
        hf_config=SimpleNamespace(to_json_string=lambda use_diff: "{}"),
        use_mla=mla,
        get_num_attention_heads=lambda config: attention // config.tensor_parallel_size,
        get_total_num_kv_heads=lambda: kv,
    )
    # vLLM's scheduler knows the layers of the first rank only.
    group = SimpleNamespace(kv_cache_spec=FullAttention(), layer_names=["layers.0"])
    config = SimpleNamespace(
        parallel_config=parallel,
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        scheduler_config=SimpleNamespace(policy="fcfs"),
        speculative_config=None,
        kv_transfer_config=None,
    )
    cache = SimpleNamespace(kv_cache_groups=[group], needs_kv_cache_zeroing=False)
    return SimpleNamespace(vllm_config=config, scheduler=SimpleNamespace(block_size=128, kv_cache_config=cache))


def workers(tp: int, pp: int, kv: int = 4) -> list[dict[str, Any]]:
    return [
        {
            "tp_rank": rank % tp,
            "pp_rank": rank // tp,
            "layers": [f"layers.{layer}" for layer in range(2) if pp == 1 or layer == rank // tp],
            "kv_shape": [max(1, kv // tp), 128, 64],
            "weights": {f"layers.{rank // tp}.norm": 7} if pp > 1 else {"layers.0.norm": 7, "layers.1.norm": 7},
            "runner": "CPUModelRunner",
            "rng": "cpu-0-generator",
            "cpu_isa": "vec",
        }
        for rank in range(tp * pp)
    ]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (8, 1), (1, 2), (2, 2)])
def test_instances_of_one_model_differ_in_their_sizes_only(tp: int, pp: int) -> None:
    one, other = facts.factors(core(), workers(1, 1)), facts.factors(core(tp, pp), workers(tp, pp))
    different = {name for name in one if one[name] != other[name]}
    assert different == {
        name for name, size in (("tensor_parallel_size", tp), ("pipeline_parallel_size", pp)) if size > 1
    }
    assert refusal(compare(one, other)) is None is refusal(compare(other, one))
    assert one["kv_groups"].startswith("2 ") and one["kv_block_shape"] == "4x128x64"


def test_another_layer_on_another_rank_is_another_model() -> None:
    changed = workers(1, 2)
    changed[1]["layers"] = ["layers.2"]
    one, other = facts.factors(core(), workers(1, 1)), facts.factors(core(1, 2), changed)
    assert "kv_groups" in (refusal(compare(one, other)) or "")


def test_a_latent_cache_is_one_head() -> None:
    assert facts.heads(core(tp=2, attention=8, kv=8, mla=True)) == (8, 1)
    assert facts.heads(core(tp=2)) == (8, 4)


def test_sizes_are_no_obstacle_but_what_cuts_a_request_by_tokens_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "missing_probes", list)
    # The rest of the engine is no engine here.
    assert facts.unsupported(core(2, 2)) == ["scheduler_class"]
    assert facts.unsupported(core(2, 1, context=2)) == ["scheduler_class", "context_parallel_size_1"]
