"""How far an engine's start has come, and why it failed, read from vLLM's log.

vLLM has no other way to tell: its HTTP server listens only when all is done. A line that no release writes any more
costs a step of the progress, nothing else.
"""

from __future__ import annotations

import re

__all__ = ["StartProgress"]

#: What is written, the percentage that it means, and what is being done from then on.
_PHASES: tuple[tuple[re.Pattern[str], int, str], ...] = tuple(
    (re.compile(pattern), percent, phase)
    for pattern, percent, phase in (
        (r"non-default args", 5, "starting the engine"),
        (r"Initializing a V\d LLM engine", 15, "starting the workers"),
        (r"Starting to load model", 30, "loading weights"),
        (r"(?:Loading weights|Model loading) took", 60, "allocating the KV cache"),
        (r"[Tt]orch\.compile|Dynamo bytecode|Compiling a graph|Capturing CUDA graph", 65, "compiling"),
        (r"KV cache size", 75, "running the model for the first time"),
        (r"init engine \(profile", 85, "starting the server"),
        (r"Starting vLLM server", 92, "starting the server"),
    )
)
_SHARDS = re.compile(r"Loading \w+ checkpoint shards:\s+(\d+)%")
#: Of an exception: its class and its text; of pydantic's, the line below.
_ERROR = re.compile(r"(?:^|[\s\]])(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit)): (\S.*)$")
_INVALID = re.compile(r"^\s*(?:Value|Assertion) error, (.+?)(?: \[type=.*)?$")
_USAGE = re.compile(r"^\S.*: error: (.+)$")
#: They only say that another process failed, or that a failed one is being put away.
_CONSEQUENCES = re.compile(
    r"initialization failed|failed to start|See (?:root cause|stack trace)|validation errors? for|Engine core proc"
    r"|Engine process|KeyboardInterrupt|CancelledError|BrokenPipe|Connection(?:Reset|Refused)|EOFError|unexpectedly"
)
_REMEDIES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), remedy)
    for pattern, remedy in (
        (
            r"out of memory|free memory|available memory|cache blocks|KV cache is|less than desired|Cannot allocate",
            "Give it a device with more free memory, or a smaller target_gpu_memory_utilization.",
        ),
        (
            r"not a local folder|repo(?:sitory)? id|model identifier|No such file|huggingface|config\.json|offline",
            "Check the name or path of the model on the standby's host (target_model).",
        ),
        (
            r"divisible|parallel|world.size|OMP_THREADS_BIND|number of (?:GPU|device)",
            "Choose another target_tp or target_pp, or give the standby the devices for it.",
        ),
    )
)
#: What vLLM's processes put in front of each line.
_PREFIX = re.compile(r"^\([\w-]+ pid=\d+\)\s?")
_MAX_TEXT = 300


class StartProgress:
    """Reads the log of one start.

    Attributes:
        percent: 0 to 100, never less than before.
        phase: what is being done.
    """

    def __init__(self) -> None:
        self.percent = 0
        self.phase = "starting vLLM"
        self._error = ""
        self._invalid = ""

    def read(self, line: str) -> bool:
        """Takes one line; returns whether it changed the percentage or the phase."""
        line = _PREFIX.sub("", line)
        self._look_for_error(line)
        before = (self.percent, self.phase)
        if shards := _SHARDS.search(line):
            self.reach(30 + int(shards[1]) // 4, "loading weights")
        for pattern, percent, phase in _PHASES:
            if pattern.search(line):
                self.reach(percent, phase)
        return (self.percent, self.phase) != before

    def reach(self, percent: int, phase: str) -> None:
        if percent > self.percent:
            self.percent, self.phase = percent, phase

    def failure(self, exit_code: int | None) -> str:
        """One sentence about why the engine did not come up, and one with the remedy."""
        reason = self._invalid or self._error
        if not reason:
            ended = "it was killed" if exit_code is not None and exit_code < 0 else f"vLLM ended with code {exit_code}"
            reason = f"{ended} while {self.phase}"
        fit = (remedy for pattern, remedy in _REMEDIES if pattern.search(reason))
        remedy = next(fit, "The log of the standby has the details.")
        return f"{reason.rstrip('.')}. {remedy}"

    def _look_for_error(self, line: str) -> None:
        if found := _INVALID.search(line):
            self._invalid = _short(found[1])
        elif (found := _ERROR.search(line)) and not _CONSEQUENCES.search(f"{found[1]}: {found[2]}"):
            self._error = _short(found[2])
        elif found := _USAGE.search(line):
            self._error = _short(found[1])


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT].rstrip() + "…"
