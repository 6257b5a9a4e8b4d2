"""What one cell of the failure table saw, and the table as a document."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.failure_cells import FAILURES, STATES, impossible
from benchmarks.failure_rig import LEASE_S

__all__ = ["Cell", "document", "line"]


@dataclass
class Cell:
    """What was seen.

    Attributes:
        clients: what they got, counted.
        first: what became of the moves that were on their way when it failed.
        outcomes: what became of the requests in the end; a living control plane tries again.
        free: KV blocks before and after by side; None for a side that was killed.
        let_go_s: seconds until nothing was parked, frozen or quarantined any more.
        silence_s: the longest pause of a client that was served, in seconds.
        problems: what is not as it should be; empty = the cell holds.
    """

    state: str
    failure: str
    clients: dict[str, int] = field(default_factory=dict)
    job: str = ""
    first: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    free: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    let_go_s: float | None = None
    silence_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def held(self) -> bool:
        return not self.problems


def document(cells: list[Cell], limit_s: float) -> str:
    """The table as Markdown."""
    lines = [
        "# What happens when something fails in the middle of a migration",
        "",
        "Written by `python -m benchmarks.failures` from the run that proves it; do not edit. Two real engines on CPU,",
        "a small model in float32, three streamed clients and one that is not, all in one wave; what is killed is",
        f"killed by SIGKILL, with all its processes. Leases of {LEASE_S:g} s instead of 30 s.",
        "",
        "- **exact**: the complete answer; text, token ids, usage and finish reason are those of an undisturbed run.",
        "- **error**: the engine that had the request is dead; what was delivered is a prefix of the undisturbed",
        "  answer, then comes one error event (or 502) with code `upstream_lost`, in the protocol's shape.",
        "- **lost**: the client's own connection ended with the proxy.",
        "- *requests*: what became of the moves first, and of the requests in the end where that is something else: a",
        "  living control plane tries again. *unknown*: the control plane was dead or fenced off when it was decided.",
        "- *free blocks*: free KV blocks on each living engine before the cell and after it. Afterwards nothing is",
        "  parked, frozen, quarantined or in a session, and the prefix cache can be emptied, which fails while anybody",
        "  holds a block.",
        "- *let go*: seconds from the failure until nothing was parked, frozen or quarantined any more (without a",
        f"  control plane: until the session was gone). Limit: {limit_s:g} s.",
        "- *silence*: longest time without a token for a client that got its whole answer, in seconds. An upper",
        "  bound: once all is let go the engines run at full speed, and with so small a model vLLM's own API server",
        "  then falls seconds behind its engine on two cores, whether anything migrates or not.",
        "",
        "| state | what it means |",
        "|---|---|",
        *(f"| {state.name} | {state.meaning} |" for state in STATES.values()),
        "",
        "| state | failure | clients | requests | job | free blocks A | free blocks B | let go | silence |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [line(cell) for cell in cells]
    lines += ["", "## Cells that make no sense", "", "| state | failure | why |", "|---|---|---|"]
    for state in STATES:
        for failure in FAILURES:
            if reason := impossible(state, failure):
                lines.append(f"| {state} | {failure} | {reason} |")
    return "\n".join(lines) + "\n"


def line(cell: Cell) -> str:
    clients = _counted(cell.clients) if cell.held else "**" + "; ".join(cell.problems).replace("|", "/") + "**"
    columns = [
        cell.state,
        cell.failure,
        clients,
        _counted(cell.outcomes),
        cell.job,
        _blocks(cell, "A"),
        _blocks(cell, "B"),
    ]
    columns.append("-" if cell.let_go_s is None else f"{cell.let_go_s:.1f}")
    columns.append(f"{cell.silence_s:.1f}" if cell.silence_s else "-")
    return "| " + " | ".join(columns) + " |"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "-"


def _blocks(cell: Cell, letter: str) -> str:
    if letter not in cell.free:
        return "?"
    before, after = cell.free[letter]
    return f"{before}, killed" if after is None else f"{before} → {after}"
