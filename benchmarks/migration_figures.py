"""From measured migrations to figures.

gap_in_itl_p50_idle, excess_ms_p50_idle: one stream onto an idle target; gap in the client's median time between tokens,
    and gap minus the median time between tokens on the target.
gap_in_itl_p50_busy, gap_in_itl_p99: eight streams onto a target with four of its own; the p99 is over all rolling cuts.
bystander_gap_in_itl: median over streams that were not being moved of their longest pause meanwhile, in their
    median time between tokens before or after it, whichever is longer.
length_ratio: median gap at 1,500 tokens over that at 100, each in its own times between tokens.
rolling_ratio: p99 of 32 rolling streams over that of 8.
bytes_ratio: whole blocks sent over whole blocks that the requests had when they left.
decode_slowdown: median time between tokens on the source while it copied, over that before, minus 1; copy_mb_per_s: how
    fast it copied.
vs_plain_stop_and_copy, vs_replay: their median gap over ours. vs_seed_p99: our p99 over that of one pause for all.
handovers: cuts that count in the p99. exact: streams with the very tokens of an undisturbed run, and all of them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from benchmarks.exactness import percentile
from benchmarks.migration_shots import Cut, Shot

__all__ = ["figures", "table"]

ROLLING = ("idle 100", "idle 1500", "busy", "rolling 8", "rolling 32", "crowd rolling")


def figures(shots: Sequence[Shot]) -> dict[str, Any]:
    """The benchmark's JSON line; None for what was not measured."""
    by = {name: _cuts(shots, name) for name in {cut.scenario for shot in shots for cut in shot.cuts}}
    idle = [*by.get("idle 100", []), *by.get("idle 1500", [])]
    rolling = [cut for name in ROLLING for cut in by.get(name, [])]
    ours = by.get("crowd rolling", [])
    slowdown, speed = _while_copying(shots)
    return {
        "gap_in_itl_p50_idle": _median([cut.in_itl for cut in idle]),
        "excess_ms_p50_idle": _median([cut.excess_ms for cut in idle]),
        "gap_in_itl_p50_busy": _median([cut.in_itl for cut in by.get("busy", [])]),
        "gap_in_itl_p99": _rounded(percentile([cut.in_itl for cut in rolling], 0.99)),
        "bystander_gap_in_itl": _median(
            [one for shot in shots if shot.scenario == "busy" for one in shot.bystander_pauses()]
        ),
        "length_ratio": _ratio(_median_itl(by.get("idle 1500")), _median_itl(by.get("idle 100"))),
        "rolling_ratio": _ratio(_p99(by.get("rolling 32")), _p99(by.get("rolling 8"))),
        "bytes_ratio": _bytes_ratio(shots),
        "decode_slowdown": slowdown,
        "copy_mb_per_s": speed,
        "vs_plain_stop_and_copy": _ratio(_gap(by.get("crowd stop_and_copy")), _gap(ours)),
        "vs_seed_p99": _ratio(_p99_ms(ours), _p99_ms(by.get("crowd atomic"))),
        "vs_replay": _ratio(_gap(by.get("replay 1500")), _gap(by.get("idle 1500"))),
        "handovers": len(rolling),
        "exact": [sum(v.exact for shot in shots for v in shot.verdicts), sum(len(shot.verdicts) for shot in shots)],
    }


def table(shots: Sequence[Shot]) -> str:
    """One line for each scenario: cuts, gaps, and where the time went."""
    lines = []
    for name in dict.fromkeys(name for shot in shots for name in (shot.scenario, shot.way_back) if name):
        cuts = _cuts(shots, name)
        mine = [shot for shot in shots if shot.scenario == name]
        states = [migration.job["state"] for shot in mine for migration in shot.migrations]
        differing = [v for shot in mine for v in shot.verdicts if not v.exact]
        lines.append(f"{name}: {len(cuts)} cuts, jobs {sorted(set(states))}, {len(differing)} differ")
        lines += [f"  {verdict.name}: {'; '.join(verdict.differences)}" for verdict in differing]
        if not cuts:
            continue
        gaps, relative = [cut.gap_ms for cut in cuts], [cut.in_itl for cut in cuts]
        lines.append(
            f"  gap {_median(gaps)} ms (p99 {_rounded(percentile(gaps, 0.99))}), in itl {_median(relative)} "
            f"(p99 {_rounded(percentile(relative, 0.99))}), itl {_median([cut.itl_ms for cut in cuts])} ms, "
            f"on the target {_median([cut.after_ms for cut in cuts])} ms"
        )
        stages = dict.fromkeys(stage for cut in cuts for stage in cut.stages)
        medians = {stage: _median([cut.stages[stage] for cut in cuts if stage in cut.stages]) for stage in stages}
        lines.append("  " + ", ".join(f"{stage} {value} ms" for stage, value in medians.items()))
        if not mine:
            continue
        pauses = [one for shot in mine for one in shot.bystander_pauses()]
        sent, had = (sum(pair) for pair in zip(*(shot.whole_blocks() for shot in mine), strict=True))
        lines.append(f"  bystanders' longest pause {_median(pauses)} itl; whole blocks sent {sent} of {had}")
    return "\n".join(lines)


def _cuts(shots: Sequence[Shot], scenario: str) -> list[Cut]:
    return [cut for shot in shots for cut in shot.cuts if cut.scenario == scenario]


def _while_copying(shots: Sequence[Shot]) -> tuple[float | None, float | None]:
    """Slowdown of decoding during the first round, and how fast that copied, over all loads that copied for a while."""
    before: list[float] = []
    during: list[float] = []
    speeds: list[float] = []
    for shot in shots:
        if not shot.scenario.startswith(("crowd", "rolling")) or not shot.migrations:
            continue
        rounds = [row for row in shot.migrations[0].rounds if row["round_index"] == 0 and row["duration_ms"] > 100]
        for row in rounds:
            begin = datetime.fromisoformat(row["started_at"]).timestamp() - shot.wall_offset
            end = begin + row["duration_ms"] / 1000
            speeds.append(row["bytes"] / row["duration_ms"] / 1000)
            for answer in shot.answers:
                times = [when for when, _ in answer.arrivals]
                pauses = [(b, (b - a) * 1000) for a, b in itertools.pairwise(times)]
                during += [pause for when, pause in pauses if begin < when - pause / 1000 and when < end]
                before += [pause for when, pause in pauses if shot.windows[0][0] - 2.0 < when < shot.windows[0][0]]
    if not during or not before:
        return None, None
    return _rounded(statistics.median(during) / statistics.median(before) - 1), _rounded(statistics.median(speeds))


def _bytes_ratio(shots: Sequence[Shot]) -> float | None:
    pairs = [shot.whole_blocks() for shot in shots if shot.scenario in ROLLING]
    return _ratio(float(sum(sent for sent, _ in pairs)), float(sum(had for _, had in pairs)))


def _median_itl(cuts: Sequence[Cut] | None) -> float | None:
    return statistics.median(cut.in_itl for cut in cuts) if cuts else None


def _gap(cuts: Sequence[Cut] | None) -> float | None:
    return statistics.median(cut.gap_ms for cut in cuts) if cuts else None


def _p99(cuts: Sequence[Cut] | None) -> float | None:
    return percentile([cut.in_itl for cut in cuts], 0.99) if cuts else None


def _p99_ms(cuts: Sequence[Cut] | None) -> float | None:
    return percentile([cut.gap_ms for cut in cuts], 0.99) if cuts else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return round(one / other, 3) if one is not None and other else None


def _median(values: Sequence[float]) -> float | None:
    return _rounded(statistics.median(values)) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
