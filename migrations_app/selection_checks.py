"""What the pre-flight check says about the choice of requests: the job's selection and the source's request filter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from migrations_app.refusals import FILTER_FAILED, FILTERED
from migrations_app.selection import Selection
from vllm_plugin.compatibility import Check

__all__ = ["filter_check", "selection_check"]

Rows = list[dict[str, Any]]


def selection_check(rows: Rows, selection: Selection) -> list[Check]:
    """Nothing without a selection; an error where it matches no request."""
    if not selection:
        return []
    count = sum(selection.matches(row) for row in rows)
    shown = f"{count} of {len(rows)} requests"
    if count:
        return [Check("selection", shown, "", "ok")]
    if selection.api_key is not None and not any("api_key" in row for row in rows):
        remedy = "The source does not know the API keys of its requests: leave api_key out."
    else:
        remedy = f"No request is selected ({selection.describe()}): widen the selection."
    return [Check("selection", shown, "", "error", remedy)]


def filter_check(status: Mapping[str, Any], rows: Rows) -> list[Check]:
    """Nothing where the source has no request filter; an error where that does not work."""
    name = status.get("request_filter")
    if not name:
        return []
    reasons = [row.get("reason") or {} for row in rows]
    problems = [status.get("request_filter_problem")]
    problems += [reason.get("message") for reason in reasons if reason.get("code") == FILTER_FAILED]
    problem = next((str(one) for one in problems if one), None)
    if problem is not None:
        return [Check("request_filter", str(name), "", "error", problem)]
    kept = sum(reason.get("code") == FILTERED for reason in reasons)
    return [Check("request_filter", f"{name} keeps {kept} of {len(rows)} requests", "", "ok")]
