"""What somebody sees who guessed a password too often."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render

from controlplane.errors import error_body

__all__ = ["locked_out"]


def locked_out(request: HttpRequest, response: HttpResponse | None, credentials: dict[str, Any]) -> HttpResponse:
    """A page for people, the common shape for programs; 429 for both."""
    if request.path.startswith("/api/"):
        body = error_body("locked_out", "Too many failed logins for this user from this address; try again later.")
        return JsonResponse(body, status=429)
    return render(request, "registration/lockout.html", status=429)
