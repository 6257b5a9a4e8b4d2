"""Live migrations between real instances of different tensor and pipeline parallel sizes, token by token."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from rich.console import Console

from benchmarks.streams import mixed_requests
from benchmarks.topology import ONE, PATHS, PIPELINE, SIZES, TENSOR, Rig, measure, rig, table
from tests.engine.conftest import FIRST_PORT, FOLDER

Result = TypeVar("Result")


class Running:
    """The rig on an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, made: Rig) -> None:
        self.runner, self.made = runner, made

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.runner.run(work)


@pytest.fixture(scope="module")
def sizes() -> Iterator[Running]:
    folder = FOLDER / "topology"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    context = rig(folder, FIRST_PORT + 50, lambda line: sys.stderr.write(line + "\n") and None)
    with asyncio.Runner() as runner:
        made = runner.run(context.__aenter__())
        try:
            yield Running(runner, made)
        finally:
            runner.run(context.__aexit__(None, None, None))


def test_streams_in_flight_go_on_exactly_on_instances_of_other_sizes(sizes: Running) -> None:
    """One rank, two tensor parallel ranks, two pipeline stages, and both at once: each to the next."""
    passages = sizes.wait(measure(sizes.made, streams=6, tokens=120))
    Console(stderr=True, width=160).print(table(passages))
    assert [(passage.source, passage.target) for passage in passages] == list(PATHS)
    for passage in passages:
        path = f"{passage.source.name} to {passage.target.name}"
        assert passage.run.migration.job["state"] == "done", (path, passage.run.migration.job)
        for verdict in passage.run.verdicts:
            assert verdict.exact, f"{path}, {verdict.name}: {verdict.differences}"
            assert verdict.counted, f"{path}, {verdict.name} was not moved in its middle: {verdict.cuts}"
        assert passage.row["bytes"] > 0 and passage.row["rounds"] >= 1
        assert passage.row["blocks_lost"] == [0, 0], path


def test_what_a_target_of_another_size_refuses_goes_on_in_the_pipeline(sizes: Running) -> None:
    """Frozen with steps in flight on two stages, refused, and back: nothing is lost and no block stays behind. The
    requests end where they are, and only then does the target take over."""
    requests = mixed_requests(6, tokens=120, salt=950)
    references = sizes.wait(sizes.made.undisturbed(requests))
    passage = sizes.wait(sizes.made.walk(PIPELINE, ONE, requests, references, refuse_commit=True))
    assert {row["outcome"] for row in passage.run.migration.requests} == {"finished"}
    assert {row["code"] for row in passage.run.migration.requests} == {"refused_by_test"}
    for verdict in passage.run.verdicts:
        assert verdict.exact, f"{verdict.name}: {verdict.differences}"
    assert passage.row["blocks_lost"] == [0, 0]


def test_pre_flight_says_how_blocks_are_cut(sizes: Running) -> None:
    factors = {size: sizes.wait(sizes.made.ask(size, "/vllm_hi/status"))["factors"] for size in SIZES}
    assert {one["heads"] for one in factors.values()} == {"4 attention, 4 KV"}
    different = {name for name in factors[ONE] if len({one[name] for one in factors.values()}) > 1}
    assert different == {"tensor_parallel_size", "pipeline_parallel_size"}
    checks = sizes.wait(sizes.made.preflight(ONE, TENSOR))
    assert checks["tensor_parallel_size"]["level"] == "ok"
    assert checks["tensor_parallel_size"]["remedy"] == "Each block is cut by KV heads: 1 share becomes 2."
    assert checks["transport"]["level"] == "ok", checks["transport"]


def test_a_part_of_a_block_that_stays_behind_shows(sizes: Running) -> None:
    """The comparison would notice: without the last block of each rank the answers are others."""
    requests = mixed_requests(6, tokens=120, salt=960)
    references = sizes.wait(sizes.made.undisturbed(requests))
    passage = sizes.wait(sizes.made.walk(ONE, PIPELINE, requests, references, skip_tail=True))
    assert {row["outcome"] for row in passage.run.migration.requests} == {"moved"}
    assert any(not verdict.exact for verdict in passage.run.verdicts)
