"""A stream that a real vLLM wrote (`tests/fakes/record.py`), in two ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from proxy.cursor import AnswerCut
from proxy.cuts import cut_for
from proxy.tags import parse_request

__all__ = ["NAMES", "Recording"]

FIXTURES = Path(__file__).parent.parent / "unit" / "proxy" / "fixtures"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.jsonl"))


class Recording:
    """One request and its answer, `fine` token by token, `coarse` with several tokens in most events."""

    def __init__(self, name: str) -> None:
        request, *lines = [json.loads(line) for line in (FIXTURES / f"{name}.jsonl").read_text().splitlines()]
        self.path: str = request["path"]
        self.body: dict[str, Any] = {"model": "tiny", "stream": True, **request["body"]}
        runs: dict[int, list[bytes]] = {}
        for line in lines:
            runs.setdefault(line["interval"], []).append(line["event"].encode())
        self.fine, self.coarse = (runs[interval] for interval in sorted(runs))

    def cut(self) -> AnswerCut:
        return cut_for(parse_request(self.path, json.dumps(self.body).encode()))

    def relay(self, *legs: list[bytes]) -> list[bytes]:
        """Returns what the client got of each leg."""
        cut, out = self.cut(), []
        for leg in legs:
            cursor = cut.cursor()
            passed = [cut.feed(cursor, event) for event in leg]
            assert not any(each.failed for each in passed)
            out.append(b"".join(each.ready for each in passed))
            if cut.finished:
                break
        return out

    def unfinished(self, leg: list[bytes]) -> list[list[bytes]]:
        """All beginnings of a leg after which there is still something to hand over."""
        return [beginning for end in range(len(leg)) if not self._finishes(beginning := leg[:end])]

    def _finishes(self, leg: list[bytes]) -> bool:
        cut = self.cut()
        cursor = cut.cursor()
        for event in leg:
            cut.feed(cursor, event)
        return cut.finished
