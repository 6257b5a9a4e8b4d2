"""Errors in the shapes that clients understand: OpenAI's, and Anthropic's for `/v1/messages`."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["ApiError", "error_event", "model_not_found", "no_instance", "upstream_lost"]

#: Anthropic's names, by HTTP status; anything else is an `api_error`.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer with an error status: `{"error": {"message", "type", "param", "code"}}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.fields = {"message": message, "type": type_, "param": param, "code": code}

    def body(self, path: str = "") -> bytes:
        """Returns the JSON document that a client of `path` understands."""
        document = self.as_anthropic() if path.startswith("/v1/messages") else {"error": self.fields}
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

    def as_anthropic(self) -> dict[str, Any]:
        """Returns the document, and event, that Anthropic's clients understand."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}}


def error_event(error: ApiError) -> bytes:
    """Returns `error` as the server-sent event that ends a stream. No `[DONE]` follows it."""
    return b"data: " + error.body() + b"\n\n"


def model_not_found(model: str) -> ApiError:
    return ApiError(
        404,
        f"The model `{model}` does not exist; GET /v1/models lists what is served.",
        type_="NotFoundError",
        param="model",
        code="model_not_found",
    )


def no_instance(model: str, retry_after_s: int) -> ApiError:
    return ApiError(
        503,
        f"No instance that serves `{model}` can be reached at the moment; try again in {retry_after_s} s.",
        type_="service_unavailable",
        code="no_instance_available",
        headers=((b"retry-after", str(retry_after_s).encode()),),
    )


def upstream_lost() -> ApiError:
    return ApiError(
        502,
        "The instance that generated this answer went away before it was complete; send the request again.",
        type_="server_error",
        code="upstream_lost",
    )
