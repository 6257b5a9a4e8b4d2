"""B compares again before it opens a session, and each arriving request's adapter with the one that it had on A."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.plugin.conftest import TOKEN
from vllm_plugin.adapters import identity, no_slot, source_refusal, target_refusal
from vllm_plugin.compatibility import FACTORS, adapters_text
from vllm_plugin.errors import MigrationError
from vllm_plugin.messages import Answer, OpenSession, SessionOpened, decode_peer
from vllm_plugin.peer import TargetConnection
from vllm_plugin.target import TargetSession, open_session
from vllm_plugin.topology import LayerPart, Layout, TopologyRefused
from vllm_plugin.wire import PROTOCOL_VERSION, FrameSocket, Hello, encode_frame

OURS = {factor.name: "same" for factor in FACTORS} | {"max_model_len": "2048", "lora": adapters_text({"fr": "aa11"})}


#: One layer on one rank.
ONE = Layout(16, ((LayerPart("layer", 0, 4, 4, 64),),))


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def make_engine(**factors: str) -> Any:
    """B's engine, as far as a session that opens and closes needs it."""
    return SimpleNamespace(
        factors=OURS | factors,
        target=None,
        settings=SimpleNamespace(bind="127.0.0.1"),
        workers=SimpleNamespace(
            allow=lambda session: None, revoke=lambda session: None, infos=[{"data_port": 9}], layout=ONE
        ),
        scheduler=SimpleNamespace(book=SimpleNamespace(expected={}, parked={})),
        on_engine=lambda call: call(),
        target_closed=lambda session: None,
    )


def opening(factors: dict[str, str], attempt: int = 1) -> OpenSession:
    return OpenSession(7, "job-1", attempt, "a", 30.0, factors)


def open_with(engine: Any, factors: dict[str, str], attempt: int = 1) -> tuple[TargetSession | None, Any]:
    link = FakeLink()
    session = open_session(engine, link, opening(factors, attempt))  # type: ignore[arg-type]
    [answer] = link.sent
    return session, answer


def test_equal_instances_get_a_session() -> None:
    engine = make_engine()
    session, answer = open_with(engine, OURS)
    assert isinstance(answer, SessionOpened)
    assert engine.target is session is not None


@pytest.mark.parametrize("factor", [factor for factor in FACTORS if factor.level == "error"], ids=lambda f: f.name)
def test_any_error_refuses_the_session(factor: Any) -> None:
    other = {"max_model_len": "9999", "lora": adapters_text({"fr": "bb22"})}.get(factor.name, "other")
    engine = make_engine()
    session, answer = open_with(engine, OURS | {factor.name: other})
    assert session is None is engine.target
    assert isinstance(answer, Answer)
    assert (answer.call, answer.ok, answer.code) == (7, False, "incompatible")
    assert all(part in answer.message for part in (factor.name, other, OURS[factor.name], factor.remedy))


def test_warnings_are_logged_and_refuse_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm").propagate = True
    caplog.set_level(logging.WARNING)
    session, _ = open_with(make_engine(), OURS | {"vllm_version": "0.31.0", "of_a_newer_release": "1"})
    assert session is not None
    said = [record.message for record in caplog.records]
    assert ["vllm_version" in said[0], "of_a_newer_release" in said[1], len(said)] == [True, True, 2]


def test_a_peer_that_says_nothing_of_itself_is_refused() -> None:
    body = encode_frame(OpenSession(7, "job-1", 1, "a", 30.0))[4:]
    message = decode_peer(body)
    assert isinstance(message, OpenSession)
    _, answer = open_with(make_engine(), message.factors)
    assert answer.code == "incompatible"


def test_an_incompatible_newer_attempt_ends_nothing() -> None:
    engine = make_engine()
    session, _ = open_with(engine, OURS)
    refused, answer = open_with(engine, OURS | {"dtype": "bfloat16"}, attempt=2)
    assert (refused, answer.code) == (None, "incompatible")
    assert engine.target is session
    newer, _ = open_with(engine, OURS, attempt=2)
    assert engine.target is newer is not None


# -- adapters ----------------------------------------------------------------------------------------------------------


def request_with(name: str | None, number: int = 1) -> Any:
    return SimpleNamespace(lora_request=name and SimpleNamespace(lora_name=name, lora_int_id=number))


def test_the_same_adapter_is_taken() -> None:
    # The number is each instance's own.
    expected = identity(request_with("fr", 1), {"fr": "aa11", "de": "bb22"})
    assert target_refusal(expected, request_with("fr", 5), {"fr": "aa11"}) is None
    assert target_refusal(identity(request_with(None), {}), request_with(None), {"fr": "aa11"}) is None


@pytest.mark.parametrize(
    ("name", "adapters"),
    [
        ("fr", {"fr": "0000"}),  # the same name, other weights
        ("fr", {}),  # unloaded at this moment
        ("de", {"fr": "aa11", "de": "aa11"}),  # the same weights under another name are another model to clients
        (None, {"fr": "aa11"}),  # the model itself
    ],
)
def test_another_adapter_is_refused(name: str | None, adapters: dict[str, str]) -> None:
    why = target_refusal("fr=aa11", request_with(name), adapters)
    assert why is not None
    assert why[0] == "lora_missing_on_target"
    assert "fr=aa11" in why[1]


def test_a_request_to_the_model_is_not_given_an_adapter() -> None:
    why = target_refusal("", request_with("fr"), {"fr": "aa11"})
    assert why is not None
    assert why[0] == "lora_missing_on_target"


def test_an_unloaded_adapter_keeps_its_requests() -> None:
    assert source_refusal(request_with(None), {}) is None
    assert source_refusal(request_with("fr"), {"fr": "aa11"}) is None
    assert (source_refusal(request_with("fr"), {"de": "aa11"}) or "")[0] == "lora_unloaded"
    # And what nobody knows is never equal by accident.
    assert target_refusal(identity(request_with("fr"), {}), request_with("fr"), {"fr": "aa11"}) is not None


@pytest.mark.parametrize(
    ("running", "promised", "late", "fits"),
    [
        ([], [], [], True),
        ([None, None], [], [], True),
        (["de"], [], [], True),
        (["de", "it"], [], [], False),
        (["de", "fr"], [], [], True),
        # A run slot that is promised is as good as taken, until the promise is over.
        (["de"], ["it"], [], False),
        (["de"], ["fr"], [], True),
        (["de"], [], ["it"], True),
    ],
)
def test_a_step_takes_so_many_adapters(
    running: list[str | None], promised: list[str], late: list[str], fits: bool
) -> None:
    def requests(names: list[Any]) -> list[Any]:
        return [request_with(name, {"fr": 1, "de": 2, "it": 3}.get(name, 0)) for name in names]

    def stream(names: list[str], until: float) -> Any:
        return SimpleNamespace(
            prepared_until=until, arrived=lambda: [SimpleNamespace(request=one) for one in requests(names)]
        )

    now = time.monotonic()
    scheduler = SimpleNamespace(
        lora_config=SimpleNamespace(max_loras=2),
        running=requests(running),
        book=SimpleNamespace(parked={"one": stream(promised, now + 60), "other": stream(late, now - 60)}),
    )
    full = no_slot(scheduler, request_with("fr", 1))
    assert (full is None) == fits
    assert no_slot(scheduler, request_with(None)) is None


# -- A's end -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def connect(listener: socket.socket, workers: Any = None) -> MigrationError:
    """Dials as A does, and returns why that failed."""
    peer = {"host": "127.0.0.1", "control_port": listener.getsockname()[1], "base_url": "http://b"}
    engine: Any = SimpleNamespace(
        settings=SimpleNamespace(token=TOKEN), name="a", factors={"dtype": "float32"}, workers=workers
    )
    with pytest.raises(MigrationError) as failure:
        TargetConnection(
            engine,
            peer,
            lambda call: OpenSession(call, "job-1", 1, "a", 30.0, engine.factors),
            lambda parked: None,
            lambda: None,
        )
    return failure.value


def serve(listener: socket.socket, answer: Callable[[socket.socket], None]) -> threading.Thread:
    thread = threading.Thread(target=lambda: answer(listener.accept()[0]), daemon=True)
    thread.start()
    return thread


def test_a_passes_on_why_b_refuses(listener: socket.socket) -> None:
    asked: list[OpenSession] = []

    def refuse(sock: socket.socket) -> None:
        frames, _ = FrameSocket.accept(sock, TOKEN, "b")
        message = decode_peer(frames.receive_body())
        assert isinstance(message, OpenSession)
        asked.append(message)
        link: Any = SimpleNamespace(send=frames.send)
        open_session(make_engine(), link, message)

    thread = serve(listener, refuse)
    error = connect(listener)
    thread.join(10)
    assert asked[0].factors == {"dtype": "float32"}
    # Lasting: the job ends with it, and nothing is tried again.
    assert (error.status, error.code) == (409, "incompatible")
    assert "differs" in error.message


def test_a_target_that_blocks_cannot_be_copied_to_ends_the_session_with_a_sentence(listener: socket.socket) -> None:
    """Before any request has been looked at."""
    ended = threading.Event()

    def open_and_wait(sock: socket.socket) -> None:
        frames, _ = FrameSocket.accept(sock, TOKEN, "b")
        message = decode_peer(frames.receive_body())
        assert isinstance(message, OpenSession)
        link: Any = SimpleNamespace(send=frames.send)
        open_session(make_engine(), link, OpenSession(message.call, "job-1", 1, "a", 30.0, OURS))
        try:
            frames.receive_body()
        except OSError:
            ended.set()

    def refuse(target: Layout, host: str, ports: list[int]) -> None:
        assert (target, host, ports) == (ONE, "127.0.0.1", [9])
        raise TopologyRefused("Start the target with --block-size 16.")

    thread = serve(listener, open_and_wait)
    error = connect(listener, workers=SimpleNamespace(routes=refuse))
    thread.join(10)
    assert (error.status, error.code, error.message) == (
        409,
        "topology_unsupported",
        "Start the target with --block-size 16.",
    )
    assert ended.is_set()


def test_another_protocol_is_told_from_no_answer(listener: socket.socket) -> None:
    def speak(sock: socket.socket) -> None:
        FrameSocket(sock).send(Hello(PROTOCOL_VERSION + 1, b"n" * 32))

    thread = serve(listener, speak)
    error = connect(listener)
    thread.join(10)
    assert (error.status, error.code) == (409, "protocol_mismatch")
    assert f"protocol {PROTOCOL_VERSION + 1}" in error.message
