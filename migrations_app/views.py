"""Pages of migrations: start one, watch it, abort it, and the history."""

from __future__ import annotations

import uuid
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.permissions import may_operate
from instances import selectors as instance_selectors
from instances.life import needs_engine
from instances.models import Instance
from instances.services import refusal_to_migrate
from migrations_app import presentation, selectors, services
from migrations_app.choices import (
    OUTCOME_TONES,
    STATE_TONES,
    TERMINAL_STATES,
    HandoverMode,
    MigrationState,
    MoveWay,
    RequestOutcome,
)
from migrations_app.forms import MigrateForm
from migrations_app.history import job_lines
from migrations_app.models import MigrationJob
from migrations_app.preflight import run_preflight
from migrations_app.selection import Selection

__all__ = ["abort", "detail", "history", "migrate"]

PAGE_SIZE = 25
EVENTS_SHOWN = 2000


def _vocabulary() -> dict[str, Any]:
    """Words and tones that the live page needs, so that they are written down in Python only."""
    return {
        "states": {
            state.value: {
                "label": str(state.label),
                "tone": STATE_TONES[state],
                "terminal": state in TERMINAL_STATES,
            }
            for state in MigrationState
        },
        "outcomes": {
            outcome.value: {"label": str(outcome.label), "tone": OUTCOME_TONES[outcome]} for outcome in RequestOutcome
        },
        "ways": {way.value: str(way.label) for way in MoveWay if way != MoveWay.BLOCKS},
        "rounds": {str(kind): label for kind, label in presentation.ROUND_LABELS.items()},
    }


@login_required
@require_safe
def history(request: HttpRequest) -> HttpResponse:
    filters = {name: request.GET[name] for name in ("state", "instance") if request.GET.get(name)}
    page = Paginator(selectors.list_jobs(filters), PAGE_SIZE).get_page(request.GET.get("page"))
    context = {
        "page": page,
        "lines": job_lines(page.object_list),
        "filters": filters,
        "states": MigrationState.choices,
        "instances": instance_selectors.list_instances(include_destroyed=True),
    }
    return render(request, "migrations_app/list.html", context)


@login_required
@require_safe
def detail(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    job = _job(job_id)
    rounds = selectors.rounds(job)
    requests = selectors.request_rows(job)
    events = selectors.events_after(job, 0, limit=EVENTS_SHOWN)
    totals = presentation.numbers(rounds, requests)
    done = job.state == MigrationState.DONE
    context = {
        "job": job,
        "steps": presentation.steps(job.state, events),
        "rounds": presentation.round_lines(rounds),
        "requests": presentation.request_lines(requests, over=job.is_terminal),
        "events": presentation.event_lines(job, events),
        "numbers": totals,
        "result": presentation.result(job, totals),
        "vocabulary": _vocabulary(),
        "selection": Selection.of(job.selection).describe(),
        "can_go_back": done and presentation.can_go_back(job),
        "can_try_again": job.is_terminal and not done and job.source.status == "active",
    }
    return render(request, "migrations_app/detail.html", context)


@login_required
@require_POST
def abort(request: HttpRequest, job_id: uuid.UUID) -> HttpResponse:
    _must_operate(request)
    job = _job(job_id)
    try:
        services.request_abort(job, request.user)
    except services.MigrationRefused as refusal:
        messages.error(request, refusal.message)
    return redirect("migrations:detail", job_id=job_id)


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def migrate(request: HttpRequest, vllm_hi_id: str) -> HttpResponse:
    """The form with the pre-flight list. It works as a page of its own; the instance page shows it in a dialog."""
    _must_operate(request)
    try:
        source = instance_selectors.get_instance(vllm_hi_id)
    except Instance.DoesNotExist as error:
        raise Http404(f"no instance {vllm_hi_id}") from error
    form = MigrateForm(request.POST or None)
    chosen = request.POST.get("target") or request.GET.get("target", "")
    if request.method == "POST" and request.POST.get("action") == "start" and form.is_valid():
        wish = form.cleaned_data
        try:
            job = services.create_migration(
                source.pk,
                wish["target"],
                wish["migration_type"],
                request.user,
                mode=wish["mode"],
                tn=wish["tn"],
                target_tp=wish["target_tp"],
                target_pp=wish["target_pp"],
                target_gpu_memory_utilization=wish["target_gpu_memory_utilization"],
                selection=form.selection(),
                drain_deadline_s=wish["drain_deadline_s"],
            )
        except services.MigrationRefused as error:
            param = (error.param or "").removeprefix("selection.")
            form.add_error(param if param in form.fields else None, error.message)
        else:
            return redirect("migrations:detail", job_id=job.pk)

    refusal = refusal_to_migrate(source, "source")
    targets = instance_selectors.migration_targets(source)
    valid = [target for target, reason in targets if reason is None]
    if not chosen and len(valid) == 1:
        chosen = valid[0].pk
    target = next((target for target in valid if target.pk == chosen), None)
    mode = request.POST.get("mode", "")
    valid_form = form.is_bound and form.is_valid()
    selection = form.selection() if valid_form else Selection()
    deadline = form.cleaned_data.get("drain_deadline_s") if valid_form else None
    preflight = None
    if target and not refusal:
        preflight = run_preflight(
            source, target, mode or HandoverMode.ROLLING, selection=selection, drain_deadline_s=deadline
        )
    context = {
        "source": source,
        "targets": targets,
        "has_valid_target": bool(valid),
        "some_without_engine": any(needs_engine(target) for target in valid),
        "chosen": chosen,
        "policy": request.POST.get("migration_type", ""),
        "modes": HandoverMode.choices,
        "mode": mode,
        "tn": request.POST.get("tn", 2),
        "drain_deadline_s": request.POST.get("drain_deadline_s", f"{settings.VLLM_HI_DRAIN_DEADLINE_S:g}"),
        "form": form,
        "refusal": refusal.message if refusal else "",
        "preflight": preflight,
        "checks": presentation.worst_first(preflight.checks) if preflight else [],
        "estimate": presentation.estimate(preflight.estimate) if preflight else "",
    }
    return render(request, "migrations_app/migrate.html", context, status=422 if form.errors else 200)


def _job(job_id: uuid.UUID) -> MigrationJob:
    try:
        return selectors.get_job(job_id)
    except MigrationJob.DoesNotExist as error:
        raise Http404(f"no migration {job_id}") from error


def _must_operate(request: HttpRequest) -> None:
    if not may_operate(request.user):
        raise PermissionDenied
