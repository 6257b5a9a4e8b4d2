"""What the whole cut rests on: inside a block vLLM's CPU attention lays out each head for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

BLOCK_SIZE = 128


def written(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Three KV blocks of a layer, [blocks, heads, tokens, 2 * head size], after vLLM has written some tokens into the
    second (v1/attention/backends/cpu_attn.py, `do_kv_cache_update`)."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens, heads, size = keys.shape
    blocks = torch.zeros(3, heads, BLOCK_SIZE, 2 * size, dtype=keys.dtype)
    both: Any = blocks.view(3, heads, BLOCK_SIZE * 2, -1).chunk(2, dim=2)
    slots = torch.arange(BLOCK_SIZE + 5, BLOCK_SIZE + 5 + tokens)
    isa = _get_attn_isa(keys.dtype, BLOCK_SIZE, size, "auto")
    ops.cpu_attn_reshape_and_cache(keys, values, *both, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 64, 80])
def test_a_range_of_heads_is_what_a_rank_with_just_these_heads_writes(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(100, 4, size, generator=generator).to(dtype) for _ in range(2))
    whole = written(keys, values)
    for first, end in ((0, 2), (2, 4), (1, 2)):
        part = written(keys[:, first:end].contiguous(), values[:, first:end].contiguous())
        assert int((part != 0).sum()) > 0
        assert torch.equal(part, whole[:, first:end])
