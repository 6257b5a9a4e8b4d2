"""Records what a real vLLM streams, once token by token and once with several tokens per event.

    python -m tests.fakes.record [--port 8600]

Writes tests/unit/proxy/fixtures/*.jsonl, one file per request: first line the request, then one line per server-sent
event, of two runs of the same request, greedy or seeded. vLLM's own `--stream-interval` does the merging, so both are
what a front end really writes. Needs an installed vLLM; the tests that read the files do not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.demo_models import tiny_model

FOLDER = Path(__file__).parent.parent / "unit" / "proxy" / "fixtures"
INTERVALS = (1, 7)
START_S = 300.0

_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Lisboa", "東京 🗼"]},
        "days": {"type": "integer", "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
_TOOL = {"name": "weather", "description": "Weather of a city."}
_OPENAI_TOOL = {"type": "function", "name": "weather", "parameters": _SCHEMA}
_ANTHROPIC_TOOL = {**_TOOL, "input_schema": _SCHEMA}
_CHAT_TOOL = {"type": "function", "function": {**_TOOL, "parameters": _SCHEMA}}
_USER = [{"role": "user", "content": "Tell me about the sea 🌊."}]
_LENGTH = 24

_CHAT, _TEXT, _MESSAGES, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
_GREEDY: dict[str, Any] = {"temperature": 0, "stream": True}
#: Several choices of one prompt have to be drawn; with a seed they are the same each time.
_DRAWN: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 7}
_USAGE = {"stream_options": {"include_usage": True}, "return_token_ids": True}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": (_RESPONSES, {"input": "Tell me about the sea 🌊.", "max_output_tokens": _LENGTH}),
    "responses_stop": (_RESPONSES, {"input": "Hi.", "max_output_tokens": _LENGTH, "stop": ["zzzzzzzzzzzz"]}),
    "responses_required": (
        _RESPONSES,
        {"input": "Hi.", "max_output_tokens": 80, "tools": [_OPENAI_TOOL], "tool_choice": "required"},
    ),
    "responses_named": (
        _RESPONSES,
        {
            "input": "Hi.",
            "max_output_tokens": 80,
            "tools": [_OPENAI_TOOL],
            "tool_choice": {"type": "function", "name": "weather"},
        },
    ),
    "messages": (_MESSAGES, {"messages": _USER, "max_tokens": _LENGTH}),
    "messages_stop": (_MESSAGES, {"messages": _USER, "max_tokens": _LENGTH, "stop_sequences": ["zzzzzzzzzzzz"]}),
    "messages_any": (
        _MESSAGES,
        {"messages": _USER, "max_tokens": 80, "tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "any"}},
    ),
    "messages_tool": (
        _MESSAGES,
        {
            "messages": _USER,
            "max_tokens": 80,
            "tools": [_ANTHROPIC_TOOL],
            "tool_choice": {"type": "tool", "name": "weather"},
        },
    ),
    "chat_required": (
        _CHAT,
        {"messages": _USER, "max_tokens": 80, "tools": [_CHAT_TOOL], "tool_choice": "required", **_USAGE},
    ),
    "chat_two": (_CHAT, {"messages": _USER, "max_tokens": 12, "logprobs": True, **_DRAWN, **_USAGE}),
    "chat_continuous": (
        _CHAT,
        {
            "messages": _USER,
            "max_tokens": 12,
            **_DRAWN,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        },
    ),
    "text_echo": (_TEXT, {"prompt": "The sea 🌊 is", "max_tokens": _LENGTH, "echo": True}),
    "text_echo_prompts": (_TEXT, {"prompt": ["The sea", "Once"], "max_tokens": 12, "echo": True, **_DRAWN}),
    "text_prompts": (_TEXT, {"prompt": ["The sea", "Once", "漢字"], "max_tokens": 12, "logprobs": 1, **_USAGE}),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8600)
    port = parser.parse_args().port
    runs = [_record(port, interval) for interval in INTERVALS]
    FOLDER.mkdir(exist_ok=True)
    for name, (path, body) in REQUESTS.items():
        lines = [json.dumps({"path": path, "body": body}, ensure_ascii=False)]
        for interval, run in zip(INTERVALS, runs, strict=True):
            lines += [json.dumps({"interval": interval, "event": event}, ensure_ascii=False) for event in run[name]]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def _record(port: int, interval: int) -> dict[str, list[str]]:
    vllm = shutil.which("vllm", path=str(Path(sys.executable).parent)) or "vllm"
    command = [vllm, "serve", str(tiny_model()), "--served-model-name", "tiny", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    command += ["--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 * 1024**2)]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--stream-interval", str(interval)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    server = subprocess.Popen(command, env=environment, stdout=sys.stderr, start_new_session=True)
    try:
        _wait(server, f"http://127.0.0.1:{port}/health")
        return {name: _events(port, path, body) for name, (path, body) in REQUESTS.items()}
    finally:
        server.terminate()
        server.wait(30)


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError("vLLM did not start")


def _events(port: int, path: str, body: dict[str, Any]) -> list[str]:
    data = json.dumps({"model": "tiny", **_GREEDY, **body}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return [event + "\n\n" for event in answer.read().decode().split("\n\n")[:-1]]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{path} {body}: {error.read().decode()}") from error


if __name__ == "__main__":
    main()
