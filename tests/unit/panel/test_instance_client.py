"""Every failure of a call becomes one exception with a code and a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from instances.client import TIMEOUTS, InstanceClient, InstanceError

Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler) -> InstanceClient:
    return InstanceClient("hi-a", "http://127.0.0.1:8000", "secret", httpx.MockTransport(handler))


def failure(handler: Handler) -> InstanceError:
    with client(handler) as instance, pytest.raises(InstanceError) as caught:
        instance.round("job", 1, 3)
    return caught.value


def test_it_sends_the_token_the_body_and_its_own_timeout() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"round": 3, "blocks": 7})

    with client(answer) as instance:
        assert instance.round("job", 2, 3)["blocks"] == 7
    (request,) = seen
    assert request.headers["Authorization"] == "Bearer secret"
    assert str(request.url) == "http://127.0.0.1:8000/vllm_hi/migration/round"
    assert json.loads(request.content) == {"job": "job", "attempt": 2, "round": 3, "slow_source": False}
    assert request.extensions["timeout"]["read"] == TIMEOUTS["round"]


def test_an_error_of_the_instance_keeps_its_code() -> None:
    error = failure(
        lambda _: httpx.Response(409, json={"error": {"code": "stale_attempt", "message": "Old.", "param": "attempt"}})
    )
    assert (error.code, error.message, error.status, error.gone) == ("stale_attempt", "Old.", 409, False)


def test_no_connection() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    error = failure(refuse)
    assert (error.code, error.gone) == ("unreachable", True)
    assert error.message == "Instance hi-a (127.0.0.1:8000) does not accept connections."


def test_silence() -> None:
    def hang(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("late", request=request)

    error = failure(hang)
    assert (error.code, error.gone) == ("no_answer", True)
    assert "stopped answering during round" in error.message


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(500, text="Traceback (most recent call last)"),
        httpx.Response(502, json={"detail": "x"}),
        httpx.Response(502, json=["x"]),
    ],
)
def test_an_error_of_a_foreign_shape_leaks_nothing(response: httpx.Response) -> None:
    error = failure(lambda _: response)
    assert error.code == "bad_answer"
    assert error.message == f"Instance hi-a (127.0.0.1:8000) answered round with status {response.status_code}."
    assert not error.gone


@pytest.mark.parametrize("response", [httpx.Response(200, text="hello"), httpx.Response(200, json=[1])])
def test_a_success_of_a_foreign_shape(response: httpx.Response) -> None:
    assert failure(lambda _: response).code == "bad_answer"
