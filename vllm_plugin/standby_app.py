"""What a standby without an engine answers (docs/protocol.md, section 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from vllm_plugin.calls import Call, CallRefused, Handler, bad_field, guarded, read_body
from vllm_plugin.engine_arguments import Instantiate

if TYPE_CHECKING:
    from vllm_plugin.standby import Standby

__all__ = ["standby_app"]


def standby_app(standby: Standby, token: str) -> FastAPI:
    """The ASGI application that holds the place of vLLM's."""

    async def status(_: Request) -> JSONResponse:
        return JSONResponse(standby.status())

    async def requests(_: Request) -> JSONResponse:
        return JSONResponse({"requests": []})

    async def instantiate(request: Request) -> JSONResponse:
        wish = await _decode(request, Instantiate)
        return JSONResponse({"engine": standby.instantiate(wish)}, 202)

    async def abort(request: Request) -> JSONResponse:
        call = await _decode(request, Call)
        standby.abort(call.job, call.attempt)
        return JSONResponse({"released": 0})

    async def no_engine(request: Request) -> JSONResponse:
        raise CallRefused(
            409,
            "engine_down",
            f"This standby has no engine, so there is no {request.path_params['call']!r}: bring it up by "
            "POST /vllm_hi/migration/instantiate first.",
        )

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": standby.engine()["state"]})

    async def inference(_: Request) -> JSONResponse:
        # As vLLM words its errors, for clients of the OpenAI API.
        error = {
            "message": "This instance is a standby without an engine; send requests to the panel's /v1.",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
        }
        return JSONResponse({"error": error}, 503)

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    router = APIRouter(prefix="/vllm_hi")
    routes: list[tuple[str, str, Handler]] = [
        ("GET", "/status", status),
        ("GET", "/requests", requests),
        ("POST", "/migration/instantiate", instantiate),
        ("POST", "/migration/abort", abort),
        ("POST", "/migration/{call}", no_engine),
    ]
    for method, path, handler in routes:
        router.add_api_route(path, guarded(token, handler), methods=[method])
    app.include_router(router)
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/{path:path}", inference, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    return app


async def _decode(request: Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await read_body(request), type=kind)
    except msgspec.MsgspecError as error:
        raise bad_field(error) from error
