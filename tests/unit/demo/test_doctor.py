"""`vllm-hi doctor`: every probe by its name, and what follows when one is missing."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from controlplane import cli
from controlplane.preparation import Check


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What looking at vLLM gives; the machine itself is fine."""
    given: dict[str, Any] = {"code": 0, "out": "", "err": ""}

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, given["code"], given["out"], given["err"])

    monkeypatch.setattr(cli, "check_start", lambda: [Check("ok", "Fine.")])
    monkeypatch.setattr(cli.subprocess, "run", run)
    return given


def test_all_probes_are_printed(answers: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    answers["out"] = "a log line\n" + json.dumps(["0.32.0", {"scheduler.schedule": True, "kv_cache_layout": True}])
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ok    probe scheduler.schedule\n" in out and "ok    probe kv_cache_layout\n" in out
    assert "vLLM 0.32.0 has all that migration needs (2 probes)" in out


def test_a_missing_probe_is_named_with_what_follows(answers: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    answers["out"] = json.dumps(["0.40.0", {"scheduler.schedule": False, "kv_cache_layout": True}])
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "ERROR probe scheduler.schedule: this vLLM does not have it" in out
    assert "vLLM 0.40.0 serves, and migration answers 501: it lacks scheduler.schedule." in out


def test_a_panel_without_vllm_is_no_error(answers: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    answers.update(code=1, err="Traceback ...\nModuleNotFoundError: No module named 'vllm'\n")
    assert cli.main(["doctor"]) == 0
    assert "cannot be looked at here: ModuleNotFoundError" in capsys.readouterr().out
