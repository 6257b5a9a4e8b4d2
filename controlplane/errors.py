"""One shape for every refusal of the API: `{"error": {"code", "message", "param"}}`."""

from __future__ import annotations

import logging
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import exception_handler as drf_handler

__all__ = ["ApiError", "error_body", "exception_handler", "flatten_validation"]

logger = logging.getLogger(__name__)

#: Our codes for what the framework raises; the rest keeps the framework's own code.
_CODES = {
    "not_authenticated": "not_authenticated",
    "authentication_failed": "wrong_token",
    "permission_denied": "permission_denied",
    "parse_error": "invalid_json",
    "invalid": "invalid_request",
}


class ApiError(exceptions.APIException):
    """A refusal with its own code, sentence, field and status."""

    def __init__(self, code: str, message: str, param: str | None, status: int) -> None:
        super().__init__(message, code)
        self.code = code
        self.message = message
        self.param = param
        self.status_code = status


def error_body(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "param": param}}


def flatten_validation(detail: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Turns the framework's nested validation detail into `[(field, sentence)]`."""
    if isinstance(detail, dict):
        found = []
        for name, inner in detail.items():
            path = prefix if name == "non_field_errors" else f"{prefix}.{name}" if prefix else str(name)
            found += flatten_validation(inner, path)
        return found
    if isinstance(detail, list):
        return [pair for inner in detail for pair in flatten_validation(inner, prefix)]
    return [(prefix, str(detail))]


def exception_handler(error: Exception, context: dict[str, Any]) -> Response | None:
    """Gives every error of a view the common shape. What is no API error becomes a logged 500 without details."""
    if isinstance(error, Http404):
        error = exceptions.NotFound()
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied()
    response = drf_handler(error, context)
    if response is None:
        logger.error("Unhandled error in %s", type(context.get("view")).__name__, exc_info=error)
        return Response(error_body("internal_error", "The panel failed; its log has the details."), status=500)
    if isinstance(error, ApiError):
        response.data = error_body(error.code, error.message, error.param)
    elif isinstance(error, exceptions.ValidationError):
        problems = flatten_validation(error.detail)
        message = " ".join(f"{field}: {text}" if field else text for field, text in problems)
        response.data = error_body("invalid_request", message, problems[0][0] or None if problems else None)
    elif isinstance(error, exceptions.APIException):
        codes = error.get_codes()
        code = codes if isinstance(codes, str) else "error"
        response.data = error_body(_CODES.get(code, code), str(error.detail))
    return response
