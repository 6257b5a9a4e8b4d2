"""Client side of every fidelity measurement: requests of many kinds, and everything a client saw of their answers.

Times are taken on this process's monotonic clock when an event arrives. Tokens are counted by their ids, because one
event may carry several.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import aiohttp

from benchmarks.answers import Answer, Request
from benchmarks.messages_answers import MessagesReader
from benchmarks.openai_answers import OpenAIReader
from benchmarks.responses_answers import ResponsesReader

__all__ = ["Answer", "Request", "answer_from", "mixed_requests", "run_requests", "sized_request"]

_SENTENCES = (
    "The harbour master counted the ships twice before the fog came in from the east.",
    "Nobody in the village remembered who had built the stone bridge, or why it leaned.",
    "A letter arrived on the third day, folded small and smelling of oranges.",
    "In the workshop the clocks disagreed with one another, politely, by a few seconds.",
    "She drew the map from memory and marked the wells with a blue pencil.",
    "The old engine needed two people, a bucket of water and a great deal of patience.",
    "Rain fell on the market for an hour, and then the light turned the colour of copper.",
    "They kept the recipe in a tin box together with a key that opened nothing.",
    "On the hill above the river a school had been turned into a library of seeds.",
    "The train was late, so the musicians played on the platform until dark.",
    "Every winter the lighthouse keeper repainted the door in a different shade of green.",
    "He explained the rules of the game again, and again they were not quite the same.",
)


class _Reader(Protocol):
    """What takes an answer apart; one for each API."""

    def event(self, name: str, data: bytes, now: float) -> None: ...

    def end(self) -> None: ...

    def document(self, document: dict[str, Any]) -> None: ...


_READERS: dict[str, Callable[[Answer], _Reader]] = {
    "/v1/responses": ResponsesReader,
    "/v1/messages": MessagesReader,
}


def mixed_requests(count: int = 8, *, tokens: int = 240, salt: int = 0, whole: int = 0) -> list[Request]:
    """Builds `count` streamed requests of eight kinds in turn, and `whole` non-streamed ones.

    Args:
        count: streamed requests.
        tokens: output tokens of each; all but `min_tokens` run to exactly that many.
        salt: changes all prompts, so that nothing is found in a prefix cache.
        whole: non-streamed requests, greedy and seeded in turn.
    """
    kinds: list[tuple[str, bool, dict[str, Any]]] = [
        ("greedy", True, {"temperature": 0}),
        ("seeded", False, {"temperature": 1.0, "seed": 1234}),
        (
            "penalties",
            True,
            {"temperature": 0, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
        ),
        ("logprobs", False, {"temperature": 0, "logprobs": 3}),
        (
            "seeded-top",
            True,
            {"temperature": 0.9, "seed": 77, "top_p": 0.9, "top_k": 40, "logprobs": True, "top_logprobs": 2},
        ),
        ("stop-strings", True, {"temperature": 0, "stop": ["THE END OF ALL", "\n\n\n\n\n"]}),
        ("min-tokens", False, {"temperature": 1.0, "seed": 5, "min_tokens": tokens - 10, "ignore_eos": False}),
        ("unseeded", False, {"temperature": 1.0, "logprobs": 0}),
    ]
    requests = []
    for index in range(count):
        kind, chat, sampling = kinds[index % len(kinds)]
        # From 100 to 600 prompt tokens, evenly.
        words = int(75 + index * 375 / max(1, count - 1))
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, **streamed, **sampling}
        name = kind if index < len(kinds) else f"{kind}-{index // len(kinds) + 1}"
        requests.append(_request(name, chat, body, words, salt * 1000 + index, kind != "unseeded"))
    for index in range(whole):
        sampling = {"temperature": 0} if index % 2 == 0 else {"temperature": 1.0, "seed": 4321 + index}
        body = {"max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, **sampling}
        requests.append(_request(f"whole-{index + 1}", index % 2 == 0, body, 120, salt * 1000 + 500 + index, True))
    return requests


def sized_request(name: str, prompt_tokens: int, tokens: int, salt: int, sampling: dict[str, Any]) -> Request:
    """A streamed text completion with a prompt of about `prompt_tokens` tokens, which runs to exactly `tokens`."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, **streamed, **sampling}
    # The sentences have 1.17 tokens to a word.
    return _request(name, False, body, round(prompt_tokens / 1.17), salt, True)


def _request(name: str, chat: bool, body: dict[str, Any], words: int, seed: int, repeatable: bool) -> Request:
    prompt = _prompt(words, seed)
    if chat:
        message = {"role": "user", "content": prompt + "\n\nContinue this story at length."}
        return Request(name, "/v1/chat/completions", {**body, "messages": [message]}, repeatable)
    return Request(name, "/v1/completions", {**body, "prompt": prompt}, repeatable)


def _prompt(words: int, seed: int) -> str:
    source = random.Random(seed)
    text = f"Chapter {seed}."
    while text.count(" ") < words:
        text += " " + source.choice(_SENTENCES)
    return text


async def run_requests(
    base_url: str,
    model: str,
    requests: Sequence[Request],
    *,
    headers: dict[str, str] | None = None,
    progress: Callable[[list[Answer]], None] | None = None,
    timeout_s: float = 300.0,
) -> list[Answer]:
    """Sends all requests at once and returns their answers in the same order.

    A failed request is an `Answer` with `error`, never an exception.

    Args:
        progress: called with the list of answers once, before the first request is sent; the entries fill up as
            events arrive, so another task can watch them.
    """
    answers = [Answer(request) for request in requests]
    if progress:
        progress(answers)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base_url, timeout=timeout, connector=connector, headers=headers) as session:
        await asyncio.gather(*(_run(session, model, answer) for answer in answers))
    return answers


async def _run(session: aiohttp.ClientSession, model: str, answer: Answer) -> None:
    request = answer.request
    reader = _reader(answer)
    try:
        async with session.post(request.path, json={"model": model, **request.body}) as response:
            answer.stream_id = response.headers.get("x-vllm-hi-stream", "")
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            elif request.streamed:
                await _read_events(response, reader)
                reader.end()
            else:
                reader.document(await response.json())
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.over = True


async def _read_events(response: aiohttp.ClientResponse, reader: _Reader) -> None:
    events = _Events(reader)
    # Not line by line: an event that repeats a long answer is longer than aiohttp's lines may be.
    async for chunk in response.content.iter_any():
        events.feed(chunk, time.monotonic())


class _Events:
    """Cuts a stream of bytes into events."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._name, self._tail = "", b""

    def feed(self, chunk: bytes, now: float) -> None:
        *lines, self._tail = (self._tail + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"event:"):
                self._name = line[6:].strip().decode()
            elif line.startswith(b"data:"):
                self._reader.event(self._name, line[5:].strip(), now)
            elif not line.strip():
                self._name = ""


def answer_from(request: Request, data: bytes) -> Answer:
    """What a client makes of the bytes of a whole stream."""
    answer = Answer(request, over=True)
    reader = _reader(answer)
    _Events(reader).feed(data, 0.0)
    reader.end()
    return answer


def _reader(answer: Answer) -> _Reader:
    return _READERS.get(answer.request.path, OpenAIReader)(answer)
