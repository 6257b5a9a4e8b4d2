"""Pages of the inventory."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from instances import selectors
from instances.models import Instance

__all__ = ["detail", "index"]


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    show_destroyed = request.GET.get("destroyed") == "1"
    context = {
        "instances": selectors.list_instances(include_destroyed=show_destroyed),
        "show_destroyed": show_destroyed,
    }
    return render(request, "instances/list.html", context)


@login_required
@require_safe
def detail(request: HttpRequest, vllm_hi_id: str) -> HttpResponse:
    try:
        instance = selectors.get_instance(vllm_hi_id)
    except Instance.DoesNotExist as error:
        raise Http404(f"no instance {vllm_hi_id}") from error
    held = sum(int(instance.requests.get(name) or 0) for name in ("parked", "frozen"))
    return render(request, "instances/detail.html", {"instance": instance, "held": held})
