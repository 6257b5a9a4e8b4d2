"""Plans between two layouts: every byte of the target is written exactly once, and from the right place."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_plugin.topology import (
    Copy,
    Cut,
    Layout,
    TopologyRefused,
    can_run,
    cuts,
    heads_text,
    in_words,
    layout_of,
    plan,
    size_refusal,
)

HEAD_BYTES, BLOCK = 6, 16


def names(layers: int) -> list[str]:
    # By name, 10 comes before 2.
    return [f"model.layers.{number}.self_attn.attn" for number in range(layers)]


def workers(tp: int, stages: list[int], kv_heads: int, head_bytes: int = HEAD_BYTES) -> list[dict[str, Any]]:
    """What the workers of an instance report, by rank, as vLLM numbers them. `stages`: layers of each stage."""
    heads = max(1, kv_heads // tp)
    found, first = [], 0
    for stage, count in enumerate(stages):
        layers = sorted(names(sum(stages))[first : first + count])
        for tp_rank in range(tp):
            found.append(
                {
                    "tp_rank": tp_rank,
                    "pp_rank": stage,
                    "layers": layers,
                    "kv_heads": [heads] * count,
                    "bytes_per_layer": [heads * head_bytes] * count,
                }
            )
        first += count
    return found


def layout(tp: int, stages: list[int], kv_heads: int, block_size: int = BLOCK, head_bytes: int = HEAD_BYTES) -> Layout:
    return layout_of(workers(tp, stages, kv_heads, head_bytes), block_size, kv_heads)


def stages_of(layers: int) -> st.SearchStrategy[list[int]]:
    """Any cut of so many layers into stages."""
    ends = st.sets(st.integers(1, layers - 1), max_size=3) if layers > 1 else st.just(set())
    return ends.map(
        lambda found: [end - start for start, end in zip([0, *sorted(found)], [*sorted(found), layers], strict=True)]
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Two instances of one model."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    sizes = [tp for tp in (1, 2, 3, 4, 6, 8, 12) if kv_heads % tp == 0 or tp % kv_heads == 0]
    layers = draw(st.integers(1, 12))
    made = [layout(draw(st.sampled_from(sizes)), draw(stages_of(layers)), kv_heads) for _ in range(2)]
    return made[0], made[1]


def content(layout: Layout) -> list[list[Any]]:
    """One block as the ranks hold it: by rank and layer, bytes that say where in the model they belong."""
    ranks = []
    for parts in layout.ranks:
        held = []
        for part in parts:
            layer = sorted(layout.layers).index(part.layer)
            heads = [
                [[layer, head, byte] for byte in range(part.head_bytes)] for head in range(part.first_head, part.end)
            ]
            held.append(np.array(heads, np.int32).reshape(-1, 3))
        ranks.append(held)
    return ranks


@given(pairs())
def test_every_byte_of_the_target_is_written_exactly_once_and_right(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    here, wanted = content(source), content(target)
    there = [[np.full_like(layer, -1) for layer in rank] for rank in wanted]
    written = [[np.zeros(len(layer), int) for layer in rank] for rank in wanted]
    for cut in cuts(source, target, plan(source, target)):
        own = cut.source or tuple((number, 0, len(layer)) for number, layer in enumerate(here[cut.source_rank]))
        theirs = cut.target or tuple((number, 0, len(layer)) for number, layer in enumerate(there[cut.target_rank]))
        for (layer, offset, size), (to_layer, to_offset, to_size) in zip(own, theirs, strict=True):
            assert size == to_size
            piece = here[cut.source_rank][layer][offset : offset + size]
            there[cut.target_rank][to_layer][to_offset : to_offset + size] = piece
            written[cut.target_rank][to_layer][to_offset : to_offset + size] += 1
    assert all((layer == 1).all() for rank in written for layer in rank)
    for rank, expected in zip(there, wanted, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(rank, expected, strict=True))


@given(pairs())
def test_the_sizes_do_not_change_what_a_block_weighs(pair: tuple[Layout, Layout]) -> None:
    assert pair[0].block_bytes == pair[1].block_bytes


@given(pairs())
def test_between_equal_instances_whole_blocks_go_rank_to_rank(pair: tuple[Layout, Layout]) -> None:
    for one in pair:
        assert cuts(one, one, plan(one, one)) == [Cut(rank, rank) for rank in range(len(one.ranks))]


def test_one_rank_to_two_and_back() -> None:
    one, two = layout(1, [1], 4), layout(2, [1], 4)
    layer = names(1)[0]
    assert plan(one, two) == [Copy(layer, 0, 2, 0, 0), Copy(layer, 2, 2, 0, 1)]
    assert plan(two, one) == [Copy(layer, 0, 2, 0, 0), Copy(layer, 2, 2, 1, 0)]
    half = 2 * HEAD_BYTES
    assert cuts(one, two, plan(one, two)) == [
        Cut(0, 0, ((0, 0, half),), ((0, 0, half),)),
        Cut(0, 1, ((0, half, half),), ((0, 0, half),)),
    ]


def test_tensor_parallel_to_pipeline_parallel() -> None:
    tp, pp = layout(2, [2], 4), layout(1, [1, 1], 4)
    found = plan(tp, pp)
    assert Counter((copy.source_rank, copy.target_rank) for copy in found) == Counter(
        {(0, 0): 1, (1, 0): 1, (0, 1): 1, (1, 1): 1}
    )


def test_a_head_that_several_ranks_hold_is_taken_once_and_in_turns() -> None:
    # Two KV heads on four ranks: 0 and 1 have the first, 2 and 3 the second.
    many, few = layout(4, [1], 2), layout(1, [1], 2)
    assert [copy.source_rank for copy in plan(many, few)] == [0, 2]
    more = layout(8, [1], 2)
    assert [copy.source_rank for copy in plan(many, more)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [copy.source_rank for copy in plan(few, many)] == [0, 0, 0, 0]


def test_a_latent_cache_is_one_head_that_every_rank_has() -> None:
    one, four = layout(1, [3], 1), layout(4, [3], 1)
    assert {copy.target_rank for copy in plan(one, four)} == {0, 1, 2, 3}
    assert cuts(four, one, plan(four, one)) == [Cut(0, 0)]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (layout(1, [2], 4, block_size=32), "--block-size 16"),
        (layout(1, [3], 4), f"Only the target has a KV cache for layer {names(3)[2]}"),
        (layout(1, [1], 4), f"Only the source has a KV cache for layer {names(2)[1]}"),
        (layout(1, [2], 8), "8 of 6 on the target"),
        (layout(1, [2], 4, head_bytes=12), "--kv-cache-dtype"),
    ],
)
def test_what_has_no_plan_is_refused_with_a_sentence(target: Layout, says: str) -> None:
    with pytest.raises(TopologyRefused) as refused:
        plan(layout(2, [2], 4), target)
    assert says in refused.value.message and refused.value.message.endswith(".")


def test_a_source_that_lacks_heads_is_refused() -> None:
    whole = layout(2, [1], 4)
    with pytest.raises(TopologyRefused, match="KV head 2"):
        plan(Layout(whole.block_size, whole.ranks[:1]), whole)


def test_heads_that_are_shared_out_in_another_way_are_refused() -> None:
    odd = workers(2, [1], 3)
    odd[0]["kv_heads"], odd[0]["bytes_per_layer"] = [2], [2 * HEAD_BYTES]
    with pytest.raises(TopologyRefused, match=r"Rank 0 of 2 holds 2 KV heads .* the model has 3"):
        layout_of(odd, BLOCK, 3)


# -- sizes -------------------------------------------------------------------------------------------------------------


def factors(attention: int, kv: int, layers: int = 12, tp: int = 1, pp: int = 1) -> dict[str, str]:
    return {
        "heads": heads_text(attention, kv),
        "kv_groups": f"{layers} FullAttentionSpec (0123)",
        "tensor_parallel_size": str(tp),
        "pipeline_parallel_size": str(pp),
    }


@pytest.mark.parametrize(
    ("attention", "kv", "tp", "pp", "says"),
    [
        (8, 4, 2, 1, None),
        (8, 2, 4, 1, None),
        (8, 1, 8, 12, None),
        # SmolLM2-135M.
        (9, 3, 2, 1, "A tensor parallel size of 2 does not divide the model's 9 attention heads and 3 KV heads: "
                     "choose one of 1, 3, 9."),
        (12, 4, 3, 1, "choose one of 1, 2, 4, 12."),
        (8, 4, 0, 1, "choose one of 1, 2, 4, 8."),
        (8, 4, 16, 1, "choose one of 1, 2, 4, 8."),
        (8, 4, 1, 13, "A pipeline parallel size of 13 does not fit the model's 12 layers: choose 1 to 12."),
        (8, 4, 1, 0, "choose 1 to 12."),
    ],
)  # fmt: skip
def test_sizes_that_fit_a_model(attention: int, kv: int, tp: int, pp: int, says: str | None) -> None:
    found = size_refusal(factors(attention, kv), tp, pp)
    assert found is None if says is None else found is not None and found.endswith(says)
    assert can_run(factors(attention, kv, tp=tp, pp=pp)) == (says is None)


def test_an_instance_that_does_not_say_enough_is_neither_refused_nor_taken() -> None:
    assert size_refusal({}, 3, 5) is None
    assert not can_run({"tensor_parallel_size": "2", "pipeline_parallel_size": "1"})
    assert not can_run(factors(8, 4) | {"heads": "many"})


def test_a_plan_in_words() -> None:
    one, two, eight = (factors(8, 4, tp=tp) for tp in (1, 2, 8))
    words = in_words(one, two, "tensor_parallel_size")
    assert words == "Each block is cut by KV heads: 1 share becomes 2."
    assert in_words(two, eight, "tensor_parallel_size").endswith("2 shares become 4, each on 2 ranks.")
    assert "1 stage becomes 3." in in_words(one, factors(8, 4, pp=3), "pipeline_parallel_size")
