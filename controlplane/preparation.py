"""What this machine must have before anything is installed or started, each said in one sentence.

Runs on the bare system Python too (`python3 controlplane/preparation.py install`), before a virtual environment
exists: standard library only, and no syntax newer than Python 3.8, so that an old Python gets its sentence as well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Check", "available_memory_bytes", "check_install", "check_start", "check_wheels", "cores", "report"]

GIB = 1024**3
PYTHON_FLOOR = (3, 11)
#: Two instances with SmolLM2 in float32 were seen at 2.6 GiB each, plus panel, worker and a margin.
MEMORY_NEEDED = 6 * GIB
#: The environment takes 3.5 GiB, the package cache about as much again while it is filled.
DISK_NEEDED = 6 * GIB


@dataclass(frozen=True)
class Check:
    """One finding. `level`: "ok", "note" (worth knowing) or "error" (nothing is started)."""

    level: str
    sentence: str


def cores() -> list[int]:
    """Cores this process may use, ascending. The affinity mask counts, not what the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_memory_bytes() -> int | None:
    """Memory that a new process can get without swapping; None where the system does not say (not Linux)."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < PYTHON_FLOOR:
        return Check(
            "error", "Python " + version + " is too old: 3.11 or newer is needed (make PYTHON=python3.11 ...)."
        )
    return Check("ok", "Python " + version + ".")


def check_memory(needed: int = MEMORY_NEEDED) -> Check:
    free = available_memory_bytes()
    if free is None:
        return Check("note", "Free memory cannot be read here; two instances need about 6 GiB.")
    text = f"{free / GIB:.1f} GiB of memory free"
    if free < needed:
        return Check("error", f"{text}: two instances need about {needed / GIB:.0f} GiB; close something first.")
    return Check("ok", text + ".")


def check_disk(folder: Path, needed: int = DISK_NEEDED) -> Check:
    free = shutil.disk_usage(str(folder)).free
    text = f"{free / GIB:.1f} GiB of disk free"
    if free < needed:
        return Check("error", f"{text}: the environment and the model need about {needed / GIB:.0f} GiB.")
    return Check("ok", text + ".")


def check_compiler() -> Check:
    found = shutil.which("g++") or shutil.which("clang++")
    if found:
        return Check("ok", "C++ compiler: " + found + " (only used when an instance runs without --enforce-eager).")
    return Check(
        "note",
        "No C++ compiler (g++): the demo runs without one; instances without --enforce-eager need it (install g++).",
    )


def check_install(root: Path) -> list[Check]:
    """Findings before `make install`: Python, disk, memory, compiler."""
    return [check_python(), check_disk(root), check_memory(), check_compiler()]


def check_start(needed: int = MEMORY_NEEDED) -> list[Check]:
    """Findings before two instances are started on this machine."""
    usable = cores()
    findings = [check_python(), check_memory(needed), check_compiler()]
    if len(usable) < 2:
        findings.append(Check("note", "Only one core is usable: both instances share it and tokens come slowly."))
    return findings


def check_wheels(uv: str, requirements: list[str]) -> Check:
    """Asks uv, without installing anything, whether every one of `requirements` can be had from where it looks."""
    command = [uv, "pip", "install", "--dry-run", "--no-deps", "--quiet", *requirements]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return Check("ok", "Wheels found for " + ", ".join(requirements) + ".")
    remedy = ""
    if "torch" in result.stderr:
        remedy = (
            " The CPU build of torch is on PyTorch's own index: make install TORCH_INDEX=<its CPU index>,"
            " or name a folder that has the wheel in PIP_FIND_LINKS."
        )
    return Check("error", "No wheel for " + ", ".join(requirements) + "." + remedy + "\n" + result.stderr.strip())


def report(findings: list[Check]) -> bool:
    """Writes one line per finding to stderr; returns whether nothing forbids going on."""
    marks = {"ok": "ok   ", "note": "note ", "error": "ERROR"}
    for finding in findings:
        sys.stderr.write("  " + marks[finding.level] + " " + finding.sentence + "\n")
    return all(finding.level != "error" for finding in findings)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="before the environment is made")
    commands.add_parser("start", help="before two instances are started")
    wheels = commands.add_parser("wheels", help="before a long download: can uv find these requirements?")
    wheels.add_argument("uv")
    wheels.add_argument("requirement", nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "install":
        findings = check_install(Path.cwd())
    elif arguments.command == "start":
        findings = check_start()
    else:
        findings = [check_wheels(arguments.uv, arguments.requirement)]
    return 0 if report(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
