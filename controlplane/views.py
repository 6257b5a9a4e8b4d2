"""Pages that belong to no domain: dashboard, playground, account."""

from __future__ import annotations

from typing import Any, cast

from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.decorators import login_required
from django.contrib.auth.forms import PasswordChangeForm
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST, require_safe
from knox.models import AuthToken, get_token_model

from instances import selectors as instance_selectors
from instances.choices import InstanceStatus
from migrations_app import selectors
from migrations_app.choices import RequestOutcome
from migrations_app.history import job_lines

__all__ = ["account", "change_password", "create_token", "dashboard", "live_streams", "playground", "revoke_token"]

STREAMS_SHOWN = 50
JOBS_SHOWN = 8


@login_required
@require_safe
def dashboard(request: HttpRequest) -> HttpResponse:
    instances = list(instance_selectors.list_instances())
    streams = instance_selectors.live_streams()
    running = list(selectors.list_jobs({"live": True}))
    recent = list(selectors.list_jobs()[:JOBS_SHOWN])
    shown = running + [job for job in recent if job not in running]
    context = {
        "instances": instances,
        "streams": streams[:STREAMS_SHOWN],
        "stream_count": len(streams),
        "hidden_streams": max(0, len(streams) - STREAMS_SHOWN),
        "running": running,
        "lines": job_lines(shown[: max(JOBS_SHOWN, len(running))]),
        "cards": {**_health(instances), "gaps": _last_gaps(), "models": len({row.get("model") for row in streams})},
    }
    return render(request, "controlplane/dashboard.html", context)


def _health(instances: list[Any]) -> dict[str, Any]:
    silent = [instance for instance in instances if not instance.is_alive]
    standby = sum(instance.status == InstanceStatus.STANDBY and instance.is_alive for instance in instances)
    note = f"{len(silent)} silent" if silent else f"{standby} on standby"
    return {"healthy": len(instances) - len(silent), "total": len(instances), "health_note": note}


def _last_gaps() -> dict[str, float | None]:
    """Gaps of the newest migration that moved a request."""
    moved = selectors.list_jobs().filter(request_rows__outcome=RequestOutcome.MOVED, request_rows__gap_ms__isnull=False)
    job = moved.first()
    return selectors.gap_summary(job) if job else {}


@login_required
@require_safe
def live_streams(request: HttpRequest) -> JsonResponse:
    """`{streams: [{stream_id, model, instance, tokens, …}]}`: the playground asks it where its own streams run."""
    return JsonResponse({"streams": instance_selectors.live_streams()})


@login_required
@require_safe
def playground(request: HttpRequest) -> HttpResponse:
    return render(request, "controlplane/playground.html")


# -- account -----------------------------------------------------------------------------------------------------------


def _account_page(
    request: HttpRequest, *, form: PasswordChangeForm | None = None, new_token: str = "", status: int = 200
) -> HttpResponse:
    form = form or PasswordChangeForm(cast(User, request.user))
    # The page has more to it than this form.
    form.fields["old_password"].widget.attrs.pop("autofocus", None)
    context = {
        "form": form,
        "tokens": get_token_model().objects.filter(user=request.user).order_by("-created"),
        "new_token": new_token,
    }
    response = render(request, "controlplane/account.html", context, status=status)
    if new_token:
        response["Cache-Control"] = "no-store"
    return response


@login_required
@require_safe
def account(request: HttpRequest) -> HttpResponse:
    return _account_page(request)


@login_required
@require_POST
def create_token(request: HttpRequest) -> HttpResponse:
    """Shows the new token in the answer itself: it is stored as a hash only and cannot be shown again."""
    _, token = AuthToken.objects.create(user=request.user)
    return _account_page(request, new_token=token)


@login_required
@require_POST
def revoke_token(request: HttpRequest, digest: str) -> HttpResponse:
    removed, _ = get_token_model().objects.filter(user=request.user, digest=digest).delete()
    if removed:
        messages.success(request, "The token is revoked; programs that use it get 401 from now on.")
    return redirect("account")


@login_required
@require_http_methods(["POST"])
@sensitive_post_parameters()
def change_password(request: HttpRequest) -> HttpResponse:
    form = PasswordChangeForm(cast(User, request.user), request.POST)
    if not form.is_valid():
        return _account_page(request, form=form, status=422)
    update_session_auth_hash(request, form.save())
    messages.success(request, "The password is changed.")
    return redirect("account")
