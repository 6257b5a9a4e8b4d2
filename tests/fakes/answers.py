"""Answers as an instance writes them: the same tokens, cut into events in any way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MODEL = "tiny"
PROMPT_IDS = [1, 2, 3]


@dataclass(frozen=True)
class Token:
    id: int
    text: str
    logprob: float


def make_tokens(count: int) -> list[Token]:
    """Returns `count` tokens with texts of several widths, the last one without any."""
    pieces = [" wort", " Grüße", "漢字", " 🦜", "", ' "x"', "\n\n", " data: {}"]
    return [Token(100 + i, pieces[i % len(pieces)] if i < count - 1 else "", -0.25 * (i + 1)) for i in range(count)]


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


@dataclass(frozen=True)
class Shape:
    """How an answer is asked for.

    Attributes:
        chat: chat completion or text completion.
        ids: token ids are wanted.
        logprobs: log probabilities are wanted.
        usage: a usage event is wanted.
        hold: characters that stop-string detection keeps back until the end.
    """

    chat: bool = True
    ids: bool = True
    logprobs: bool = False
    usage: bool = False
    hold: int = 0


def events(tokens: list[Token], groups: list[int], shape: Shape, answer_id: str, created: int = 1) -> list[bytes]:
    """Returns the server-sent events of an answer whose tokens come in `groups`; the last group finishes it."""
    assert sum(groups) == len(tokens)
    head = {
        "id": answer_id,
        "object": "chat.completion.chunk" if shape.chat else "text_completion",
        "created": created,
        "model": MODEL,
    }
    out: list[dict[str, Any]] = []
    if shape.chat:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        out.append({**head, "choices": [role], "prompt_token_ids": PROMPT_IDS if shape.ids else None})
    done = sent = 0
    for number, size in enumerate(groups):
        group = tokens[done : done + size]
        done += size
        last = number == len(groups) - 1
        text = text_of(tokens[:done])
        upto = len(text) if last else max(sent, len(text) - shape.hold)
        choice: dict[str, Any] = {"index": 0}
        if shape.chat:
            choice["delta"] = {"content": text[sent:upto]}
        else:
            choice["text"] = text[sent:upto]
        sent = upto
        choice["logprobs"] = _logprobs(tokens, done - size, done, shape.chat) if shape.logprobs else None
        choice["finish_reason"] = "length" if last else None
        if last:
            choice["stop_reason"] = None
        if shape.ids and not shape.chat and number == 0:
            choice["prompt_token_ids"] = PROMPT_IDS
        choice["token_ids"] = [token.id for token in group] if shape.ids else None
        out.append({**head, "choices": [choice]})
    if shape.usage:
        out.append({**head, "choices": [], "usage": usage(tokens)})
    return [event(json.dumps(x, ensure_ascii=False, separators=(",", ":"))) for x in out] + [event("[DONE]")]


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def usage(tokens: list[Token]) -> dict[str, int]:
    return {"prompt_tokens": 3, "completion_tokens": len(tokens), "total_tokens": 3 + len(tokens)}


def document(tokens: list[Token], shape: Shape, answer_id: str) -> dict[str, Any]:
    """Returns the non-streamed answer."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    if shape.chat:
        choice["message"] = {"role": "assistant", "content": text_of(tokens)}
    else:
        choice["text"] = text_of(tokens)
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
        "usage": usage(tokens),
    }


def _logprobs(tokens: list[Token], start: int, end: int, chat: bool) -> dict[str, Any]:
    group = tokens[start:end]
    if chat:
        return {"content": [{"token": t.text, "logprob": t.logprob, "bytes": None, "top_logprobs": []} for t in group]}
    offsets, offset = [], len(text_of(tokens[:start]))
    for token in group:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "text_offset": offsets,
        "token_logprobs": [t.logprob for t in group],
        "tokens": [t.text for t in group],
        "top_logprobs": [{t.text: t.logprob} for t in group],
    }


@dataclass
class Received:
    """All that a client makes of a stream."""

    text: str
    token_ids: list[int]
    logprobs: list[Any]
    finish_reasons: list[str]
    usages: list[Any]
    roles: int
    prompts: int
    ids: set[str]
    created: set[int]
    done: int
    errors: list[Any]


def read_stream(data: bytes) -> Received:
    """Reads a stream as an OpenAI client does."""
    got = Received("", [], [], [], [], 0, 0, set(), set(), 0, [])
    assert data.endswith(b"\n\n") or not data
    for raw in data.split(b"\n\n")[:-1]:
        assert raw.startswith(b"data: "), raw
        if raw == b"data: [DONE]":
            got.done += 1
            continue
        assert not got.done, "something follows [DONE]"
        chunk = json.loads(raw[6:])
        if "error" in chunk:
            got.errors.append(chunk["error"])
            continue
        got.ids.add(chunk["id"])
        got.created.add(chunk["created"])
        got.prompts += chunk.get("prompt_token_ids") is not None
        if chunk.get("usage") is not None:
            got.usages.append(chunk["usage"])
        for choice in chunk["choices"]:
            _read_choice(got, choice)
    return got


def _read_choice(got: Received, choice: dict[str, Any]) -> None:
    delta = choice.get("delta") or {}
    got.text += choice.get("text") or delta.get("content") or ""
    got.roles += "role" in delta
    got.prompts += choice.get("prompt_token_ids") is not None
    got.token_ids += choice.get("token_ids") or []
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        got.logprobs += logprobs["content"]
    elif logprobs:
        fields = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        got.logprobs += [list(entry) for entry in zip(*(logprobs[field] for field in fields), strict=True)]
    if choice["finish_reason"] is not None:
        got.finish_reasons.append(choice["finish_reason"])
