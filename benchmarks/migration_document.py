"""docs/benchmarks.md: figures with their bars, the rounds of each scenario, and what the clients' token rates looked
like."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.migration_figures import table
from benchmarks.migration_shots import Shot, switch_times

__all__ = ["write_document"]

#: Figure -> the most that it may be, or for those in `AT_LEAST` the least.
BARS = {
    "gap_in_itl_p50_idle": 1.4,
    "excess_ms_p50_idle": 12,
    "gap_in_itl_p50_busy": 1.6,
    "gap_in_itl_p99": 2.3,
    "bystander_gap_in_itl": 2,
    "length_ratio": 1.1,
    "rolling_ratio": 1.3,
    "bytes_ratio": 1.05,
    "decode_slowdown": 0.15,
    "vs_plain_stop_and_copy": 3,
    "vs_seed_p99": 0.8,
    "vs_replay": 5,
}
AT_LEAST = frozenset({"vs_plain_stop_and_copy", "vs_replay"})
#: Seconds of one point of a plot, and what is shown before and after a migration.
BIN_S, BEFORE_S, AFTER_S = 0.1, 3.0, 4.0


def write_document(path: Path, shots: Sequence[Shot], figures: dict[str, Any], command: str) -> None:
    """Writes the document, and its plots into `images` beside it."""
    images = path.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    lines = [
        "# What a migration costs",
        "",
        f"Written by `{command}`; do not edit. Two instances on one machine with two cores and",
        "without a GPU, SmolLM2-135M in float32, prefix cache of the target emptied before each migration. All figures",
        "are ratios of times from one run.",
        "What each name means: `benchmarks/migration_figures.py`. The bars were set on a machine with steps of 26 ms",
        "for one stream; where steps take longer and copies do not, there is less to win by copying ahead.",
        "",
        "| figure | measured | bar | held |",
        "|---|---|---|---|",
        *(_row(name, value) for name, value in figures.items()),
        "",
        "## Where the time goes",
        "",
        "Medians. `freeze` is the rest of the source's running step, whose token still reaches the client; the gap is",
        "tail, commit and first step on the target, and what lies between.",
        "",
        "```",
        table(shots),
        "```",
        "",
        "## Rounds",
        "",
        "| scenario | round | blocks | MB | ms | became ready meanwhile |",
        "|---|---|---|---|---|---|",
        *_rounds(shots),
        "",
    ]
    for name, title, chosen in _plots(shots):
        _plot(images / f"{name}.svg", title, chosen)
        lines += [f"## {title}", "", f"![{title}](images/{name}.svg)", ""]
    path.write_text("\n".join(lines))


def _row(name: str, value: Any) -> str:
    bar = BARS.get(name)
    if bar is None:
        return f"| `{name}` | {value} | | |"
    least = name in AT_LEAST
    held = "" if value is None else "yes" if (value >= bar if least else value <= bar) else "**no**"
    return f"| `{name}` | {value} | {'at least' if least else 'at most'} {bar} | {held} |"


def _rounds(shots: Sequence[Shot]) -> list[str]:
    """The rounds of the first migration of each scenario."""
    lines = []
    for scenario in dict.fromkeys(shot.scenario for shot in shots if shot.migrations):
        migration = next(shot for shot in shots if shot.scenario == scenario and shot.migrations).migrations[0]
        for row in migration.rounds:
            lines.append(
                f"| {scenario} | {row['round_index']} ({row['kind']}) | {row['blocks']} | {row['bytes'] / 1e6:.1f} | "
                f"{row['duration_ms']:.0f} | {row['dirty_blocks']} |"
            )
        moved = [row for row in migration.requests if row["outcome"] == "moved"]
        size = sum(row["tail_bytes"] for row in moved) / 1e6
        lines.append(f"| {scenario} | handovers | {sum(row['tail_blocks'] for row in moved)} | {size:.1f} | - | - |")
    return lines


def _plots(shots: Sequence[Shot]) -> list[tuple[str, str, dict[str, Shot]]]:
    """(file name, title, what is drawn in it by label)."""
    first = {name: next(shot for shot in shots if shot.scenario == name) for name in {shot.scenario for shot in shots}}
    crowd = {name.removeprefix("crowd "): shot for name, shot in sorted(first.items()) if name.startswith("crowd ")}
    long = {"KV moved": first.get("idle 1500"), "computed again": first.get("replay 1500")}
    alone = {label: shot for label, shot in long.items() if shot is not None}
    plots = []
    if crowd:
        plots.append(("token-rate-load", "Tokens per second of all clients, full load", crowd))
    if alone:
        plots.append(("token-rate-long", "Tokens per second of one client, 1,500 tokens of context", alone))
    return plots


def _plot(path: Path, title: str, chosen: dict[str, Shot]) -> None:
    """Token rate over time, one drawing for each way, with begin and end of the handovers marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.2 * len(chosen) + 0.6), layout="constrained")
    axes = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (label, shot) in zip(axes, chosen.items(), strict=True):
        begin, end = shot.windows[0]
        times = [when - begin for answer in shot.answers for when, count in answer.arrivals for _ in range(count)]
        places = [-BEFORE_S + BIN_S * index for index in range(round((BEFORE_S + end - begin + AFTER_S) / BIN_S))]
        rates = [sum(place <= when < place + BIN_S for when in times) / BIN_S for place in places]
        axis.step(places, rates, where="post", linewidth=1.2)
        axis.axvspan(0, end - begin, alpha=0.08)
        for when in _switches(shot):
            axis.axvline(when - begin, linewidth=0.8, linestyle=":", color="black")
        axis.set_ylabel("tokens/s")
        usual = statistics.median([rate for place, rate in zip(places, rates, strict=True) if place < 0] or [0.0])
        axis.set_title(f"{label} (before: {usual:.0f} tokens/s)", fontsize=9, loc="left")
    axes[-1].set_xlabel("seconds since the operator pressed Migrate (shaded: the migration; dotted: switches)")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def _switches(shot: Shot) -> list[float]:
    """When each client got its first token from the target, on the clock of the arrivals."""
    return [when for answer in shot.answers for when in switch_times(answer, shot.migrations[0].requests)]
