"""Parts about migrations inside pages of apps that do not know this one."""

from __future__ import annotations

from typing import Any

from django import template

from instances.models import Instance
from migrations_app.history import job_lines
from migrations_app.selectors import list_jobs

register = template.Library()

SHOWN = 10


@register.inclusion_tag("migrations_app/_of_instance.html")
def migrations_of(instance: Instance) -> dict[str, Any]:
    """The newest migrations that have the instance as source or target."""
    return {"lines": job_lines(list_jobs({"instance": instance.pk})[:SHOWN]), "instance": instance}
