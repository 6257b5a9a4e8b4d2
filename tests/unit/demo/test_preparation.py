"""What a machine lacks is said in one sentence, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane import preparation


def test_too_little_memory_forbids_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "available_memory_bytes", lambda: 2 * preparation.GIB)
    finding = preparation.check_memory()
    assert finding.level == "error"
    assert "2.0 GiB of memory free" in finding.sentence and "about 6 GiB" in finding.sentence


def test_too_little_disk_forbids_the_installation(tmp_path: Path) -> None:
    finding = preparation.check_disk(tmp_path, needed=10**18)
    assert finding.level == "error" and "of disk free" in finding.sentence


def test_an_old_python_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation.sys, "version_info", (3, 9, 18, "final", 0))
    finding = preparation.check_python()
    assert finding.level == "error" and "3.9.18" in finding.sentence and "PYTHON=" in finding.sentence


def test_a_missing_compiler_is_worth_a_note_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation.shutil, "which", lambda name: None)
    assert preparation.check_compiler().level == "note"


def test_a_missing_wheel_is_said_with_where_to_get_it(tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho 'no torch here' >&2\nexit 1\n")
    uv.chmod(0o755)
    finding = preparation.check_wheels(str(uv), ["torch==2.13.0+cpu"])
    assert finding.level == "error" and "TORCH_INDEX" in finding.sentence


def test_one_error_is_enough_to_stop(capsys: pytest.CaptureFixture[str]) -> None:
    assert preparation.report([preparation.Check("ok", "fine"), preparation.Check("note", "well")])
    assert not preparation.report([preparation.Check("ok", "fine"), preparation.Check("error", "no")])
    assert "ERROR no" in capsys.readouterr().err
