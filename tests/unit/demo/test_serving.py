"""Both instances are started alike, each on cores of its own."""

from __future__ import annotations

import pytest

from controlplane import serving


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        ([0], ("0", "0")),
        ([0, 1], ("0", "1")),
        ([4, 7], ("4", "7")),
        ([0, 1, 2], ("0", "1")),
        (list(range(6)), ("0,1,2", "3,4,5")),
        (list(range(16)), ("0,1,2,3", "4,5,6,7")),
    ],
)
def test_cores_come_from_the_affinity_mask(
    monkeypatch: pytest.MonkeyPatch, usable: list[int], expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(serving, "cores", lambda: usable)
    assert (serving.cores_of_instance(0), serving.cores_of_instance(1)) == expected


def test_a_step_has_room_for_every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "runs_on_cpu", lambda: True)
    options = serving.InstanceOptions(model="m", max_num_seqs=3, max_model_len=100, arguments=("--seed", "1"))
    command = serving.serve_command(options, "B", 8001, "127.0.0.1:8002", 9001)
    assert command[command.index("--max-num-batched-tokens") + 1] == "300"
    assert command[command.index("--vllm-hi-type") + 1] == "B"
    assert command[-2:] == ["--seed", "1"]
