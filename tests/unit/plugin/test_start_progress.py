from __future__ import annotations

import pytest

from tests.fakes import vllm_serve
from vllm_plugin.start_progress import StartProgress


def read(*lines: str) -> StartProgress:
    progress = StartProgress()
    for line in lines:
        progress.read(line)
    return progress


def test_the_percentage_follows_the_log_and_never_falls():
    progress = StartProgress()
    seen = []
    for line in (*vllm_serve.START, *vllm_serve.REST):
        if progress.read(line):
            seen.append((progress.percent, progress.phase))
    assert seen == [
        (5, "starting the engine"),
        (15, "starting the workers"),
        (30, "loading weights"),
        (42, "loading weights"),
        (60, "allocating the KV cache"),
        (75, "running the model for the first time"),
        (85, "starting the server"),
    ]
    assert not progress.read(vllm_serve.START[0])
    assert progress.percent == 85


@pytest.mark.parametrize(
    ("lines", "reason", "remedy"),
    [
        (
            vllm_serve.NO_MODEL,
            "Invalid repository ID or local directory specified: '/no/model'. ",
            "Check the name or path of the model",
        ),
        (vllm_serve.NO_MEMORY, "Free memory on device cuda:0 (1.0/80.0 GiB)", "smaller target_gpu_memory_utilization"),
        (
            ["(Worker pid=1) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
            "CUDA out of memory",
            "smaller target_gpu_memory_utilization",
        ),
        (["vllm serve: error: argument --dtype: invalid choice: 'x'"], "argument --dtype: invalid choice: 'x'", "log"),
        (
            ["ValueError: Total number of attention heads (9) must be divisible by tensor parallel size (2)."],
            "Total number of attention heads (9)",
            "Choose another target_tp",
        ),
    ],
)
def test_a_failure_becomes_a_sentence_with_a_remedy(lines: list[str], reason: str, remedy: str):
    text = read(*lines).failure(1)
    assert text.startswith(reason), text
    assert remedy in text
    assert text.endswith(".")


def test_a_failure_without_a_word_says_how_far_it_was():
    progress = read(*vllm_serve.START)
    assert progress.failure(-9) == "it was killed while loading weights. The log of the standby has the details."
    assert progress.failure(3).startswith("vLLM ended with code 3 while loading weights.")


def test_a_long_error_is_cut():
    assert len(read("ValueError: " + "x" * 5000).failure(1)) < 400
