"""The version guard: a probe for each thing that is relied on, and the same behaviour on every supported vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.version_sources import Unpacked
from vllm_plugin import compat, queues
from vllm_plugin.compat import Scheduler, missing_probes, probes
from vllm_plugin.sources import Installed


def installed_sources() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.parent


# -- dynamic -----------------------------------------------------------------------------------------------------------


def test_the_installed_vllm_has_everything():
    assert missing_probes() == []


@pytest.mark.parametrize(
    ("method", "probe"),
    [
        ("_inflight_prefill_reserved_blocks", "scheduler._inflight_prefill_reserved_blocks"),
        ("_preempt_request", "scheduler._preempt_request"),
    ],
)
def test_a_method_that_is_gone_is_named(method: str, probe: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(Scheduler, method)
    assert missing_probes() == [probe]


def test_a_method_that_lost_an_argument_is_named(monkeypatch: pytest.MonkeyPatch):
    def allocate_slots(self: Any, request: Any, num_new_tokens: int) -> None: ...

    monkeypatch.setattr(compat.KVCacheManager, "allocate_slots", allocate_slots)
    assert missing_probes() == ["kv_cache_manager.allocate_slots"]


def test_a_module_that_moved_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(compat._PATHS, "BlockPool", "vllm.nowhere:BlockPool")
    assert missing_probes() == ["kv_cache_manager.block_pool"]


def test_a_probe_that_raises_counts_as_missing(monkeypatch: pytest.MonkeyPatch):
    def fails(sources: Any) -> bool:
        raise RuntimeError("not as we know it")

    monkeypatch.setitem(compat._PROBES, "scheduler.schedule", fails)
    assert missing_probes() == ["scheduler.schedule"]


def test_a_name_must_be_known_to_be_taken():
    with pytest.raises(AttributeError):
        _ = compat.BlockPool  # type: ignore[attr-defined]


# -- static ------------------------------------------------------------------------------------------------------------


def test_reading_the_sources_says_the_same_as_looking_at_the_installed_vllm():
    assert probes(Unpacked(installed_sources())) == probes(Installed())


class Spoiled(Unpacked):
    """The installed sources with one module changed; None: without it."""

    def __init__(self, module: str, change: Callable[[str], str] | None) -> None:
        super().__init__(installed_sources())
        self.spoiled, self.change = module, change

    def module_text(self, module: str) -> str:
        text = super().module_text(module)
        if module != self.spoiled:
            return text
        if self.change is None:
            raise ModuleNotFoundError(module)
        assert self.change(text) != text
        return self.change(text)


@pytest.mark.parametrize(
    ("module", "old", "new", "missing"),
    [
        ("core.sched.scheduler", "def _preempt_request(", "def _evict(", ["scheduler._preempt_request"]),
        ("core.sched.scheduler", "self.kv_holding_waiting", "self.other", ["scheduler.resumed_first"]),
        # 0.30 has the older name only, and that is enough.
        ("core.sched.scheduler", "self.max_num_active_reqs", "self.other", []),
        ("core.kv_cache_manager", "reserved_blocks: int", "kept: int", ["kv_cache_manager.allocate_slots"]),
        ("request", "self.resumable", "self.may_resume", ["request.attributes"]),
        ("outputs", "sampled_token_ranks: np", "ranks: np", ["logprobs_lists.fields"]),
        ("worker.gpu_model_runner", "self.requests", "self.states", ["model_runner.requests"]),
        ("engine.core", "isinstance(result, Future)", "hasattr(result, 'done')", ["engine_core.utility_future"]),
    ],
)
def test_what_other_sources_lack_is_named(module: str, old: str, new: str, missing: list[str]):
    assert missing_probes(Spoiled(f"vllm.v1.{module}", lambda text: text.replace(old, new))) == missing


def test_without_a_module_what_needs_it_is_named():
    assert missing_probes(Spoiled("vllm.v1.kv_cache_layout", None)) == ["kv_cache_layout"]


def test_an_attribute_that_is_only_read_is_not_taken_for_one_that_is_set(tmp_path: Path):
    (tmp_path / "some.py").write_text(
        "class Base:\n    def __init__(self):\n        self.mine: int = self.theirs\n"
        "class Derived(Base):\n    field: int\n    def later(self):\n        self.late = 1\n"
    )
    sources = Unpacked(tmp_path)
    assert sources.assigned("some:Derived") == {"mine"}
    assert {"field", "later", "__init__"} <= sources.members("some:Derived")


def test_a_class_is_found_through_the_module_that_passes_it_on(tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from .inner import Thing as Passed\n")
    (tmp_path / "package" / "inner.py").write_text("class Thing:\n    def act(self, *, now, later=0): ...\n")
    sources = Unpacked(tmp_path)
    assert sources.has("package:Passed") and not sources.has("package:Thing")
    assert sources.parameters("package:Passed", "act") == {"self", "now", "later"}
    with pytest.raises(LookupError):
        sources.parameters("package:Passed", "gone")


def test_another_way_to_draw_tokens_has_another_fingerprint(monkeypatch: pytest.MonkeyPatch):
    before = compat.sampler_fingerprint()
    real = Installed.module_text
    monkeypatch.setattr(Installed, "module_text", lambda self, module: "# a comment\n" + real(self, module))
    assert compat.sampler_fingerprint() == before
    monkeypatch.setattr(
        Installed, "module_text", lambda self, module: real(self, module).replace("fused_gumbel_argmax", "other")
    )
    assert compat.sampler_fingerprint() != before


# -- the same in every supported version -------------------------------------------------------------------------------


class Queue(list[Any]):
    def prepend_request(self, request: Any) -> None:
        self.insert(0, request)

    def add_request(self, request: Any) -> None:
        self.append(request)


def waiting(computed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(num_computed_tokens=computed)


def scheduler_030(slots: int = 4) -> Any:
    return SimpleNamespace(max_num_running_reqs=slots, running=[], waiting=Queue(), skipped_waiting=Queue())


def scheduler_031(slots: int = 4) -> Any:
    """0.31 and 0.32."""
    made = SimpleNamespace(
        max_num_running_reqs=64, max_num_active_reqs=slots, running=[], waiting=Queue(), kv_holding_waiting=Queue()
    )

    def enqueue(request: Any) -> None:
        (made.kv_holding_waiting if request.num_computed_tokens else made.waiting).add_request(request)

    made._enqueue_waiting_request = enqueue
    return made


both = pytest.mark.parametrize("make", [scheduler_030, scheduler_031])


@both
def test_promised_slots_are_kept_from_admissions_and_given_back(make: Callable[[], Any]):
    scheduler = make()
    attribute = queues._run_slots_attribute(scheduler)
    before = vars(scheduler).copy()
    with pytest.raises(RuntimeError), queues.promised_run_slots(scheduler, 3):
        assert queues.run_slots(scheduler) == 1
        raise RuntimeError("a step failed")
    assert queues.run_slots(scheduler) == 4
    assert {**vars(scheduler), attribute: 4} == before


@both
def test_the_limit_never_falls_below_what_runs(make: Callable[[], Any]):
    scheduler = make()
    scheduler.running = [waiting(5), waiting(5), waiting(5)]
    with queues.promised_run_slots(scheduler, 3):
        assert queues.run_slots(scheduler) == 3


@both
def test_a_resumed_request_is_counted_and_waits_before_the_others(make: Callable[[], Any]):
    scheduler = make()
    assert queues.nothing_waits(scheduler)
    scheduler.waiting.append(waiting())
    assert not queues.nothing_waits(scheduler)
    assert queues.committed_waiting(scheduler) == 0
    resumed = waiting(12)
    queues.enqueue_resumed(scheduler, resumed)
    assert queues.committed_waiting(scheduler) == 1
    first = scheduler.skipped_waiting if hasattr(scheduler, "skipped_waiting") else scheduler.kv_holding_waiting
    assert first[0] is resumed
    scheduler.waiting.clear()
    assert not queues.nothing_waits(scheduler)
