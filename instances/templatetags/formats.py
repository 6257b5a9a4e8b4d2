"""Numbers, times, badges and bars as people read them. static/js/format.js follows the same rules in the browser."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

register = template.Library()

NO_VALUE = "\N{EN DASH}"


def _number(value: object) -> float | None:
    """None also for the empty string that a template makes of a missing variable."""
    return value if isinstance(value, (int, float)) else None


@register.filter
def count(value: object) -> str:
    """1234567 → "1,234,567"."""
    number = _number(value)
    return NO_VALUE if number is None else f"{number:,}"


@register.filter
def size(value: object) -> str:
    """Bytes to a decimal unit: 12400000 → "12.4 MB"."""
    amount = _number(value)
    if amount is None:
        return NO_VALUE
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.{1 if amount < 100 else 0}f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


@register.filter
def milliseconds(value: object) -> str:
    """6.13 → "6.1 ms", 61.3 → "61 ms", 61300 → "1 min 01 s"."""
    number = _number(value)
    if number is None:
        return NO_VALUE
    if number >= 10_000:
        return seconds(number / 1000)
    return f"{number:.1f} ms" if number < 10 else f"{number:.0f} ms"


@register.filter
def seconds(value: object) -> str:
    """0.031 → "0.03 s", 4.21 → "4.2 s", 75 → "1 min 15 s"."""
    number = _number(value)
    if number is None:
        return NO_VALUE
    total = max(0.0, number)
    if total < 60:
        return f"{total:.{2 if total < 1 else 1}f} s"
    whole = int(total)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@register.filter
def times(value: object) -> str:
    """A multiple, with a multiplication sign: 1.62 → "1.6 x"."""
    number = _number(value)
    return NO_VALUE if number is None else f"{number:.1f}\N{MULTIPLICATION SIGN}"


@register.filter
def percent(fraction: object) -> str:
    """0.421 → "42 %"."""
    number = _number(fraction)
    return NO_VALUE if number is None else f"{number * 100:.0f} %"


@register.filter
def words(name: str) -> str:
    """ "block_size" → "block size"."""
    return str(name).replace("_", " ")


@register.simple_tag
def ago(moment: datetime | None) -> SafeString | str:
    """The UTC time, which the browser turns into "12 s ago"."""
    if moment is None:
        return NO_VALUE
    return format_html(
        '<time datetime="{}" data-ago>{}</time>', moment.isoformat(), moment.strftime("%Y-%m-%d %H:%M:%S")
    )


@register.inclusion_tag("components/badge.html")
def badge(word: str, tone: str) -> dict[str, Any]:
    """Colour, icon and word. `tone` is one of ok, info, busy, warning, error, muted."""
    return {"word": word, "tone": tone}


@register.inclusion_tag("components/bar.html")
def bar(fraction: float | None) -> dict[str, Any]:
    """A horizontal bar for 0 to 1; warm above 80 %, hot above 95 %."""
    share = min(1.0, max(0.0, fraction or 0.0))
    return {"percent": f"{share * 100:.1f}", "heat": "hot" if share > 0.95 else "warm" if share > 0.8 else ""}
