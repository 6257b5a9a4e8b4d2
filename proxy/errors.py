"""Errors in the shape that OpenAI clients understand."""

from __future__ import annotations

import json

__all__ = ["ApiError", "error_event", "model_not_found", "no_instance", "upstream_lost"]


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

    def body(self) -> bytes:
        """Returns the JSON document."""
        return json.dumps({"error": self.fields}, ensure_ascii=False, separators=(",", ":")).encode()


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
