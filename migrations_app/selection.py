"""Which of the source's requests a migration is about. Pure: works on the rows of an instance's `/vllm_hi/requests`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Selection"]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Selection:
    """What a request must be like; None: it does not matter. All conditions must hold, bounds included.

    Attributes:
        request_ids: ids as the instance lists them, or stream ids as clients got them (`x-vllm-hi-stream`).
        min_tokens, max_tokens: length so far, prompt and output.
        min_age_s, max_age_s: seconds since the request came.
        min_kv_blocks, max_kv_blocks: blocks that it holds.
        model: the served name, or that of a LoRA adapter.
        api_key: id of the client's key; only where the proxy asks for keys.
    """

    request_ids: tuple[str, ...] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    min_age_s: float | None = None
    max_age_s: float | None = None
    min_kv_blocks: int | None = None
    max_kv_blocks: int | None = None
    model: str | None = None
    api_key: str | None = None

    @classmethod
    def of(cls, stored: Mapping[str, Any] | None) -> Selection:
        """The selection that `as_json` stored. Raises: TypeError for a field that there is not."""
        fields = dict(stored or {})
        if fields.get("request_ids") is not None:
            fields["request_ids"] = tuple(fields["request_ids"])
        return cls(**fields)

    def as_json(self) -> dict[str, Any]:
        """What is set, for JSON."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return fields | ({"request_ids": list(self.request_ids)} if self.request_ids is not None else {})

    def __bool__(self) -> bool:
        """False if every request matches."""
        return bool(self.as_json())

    def problem(self) -> tuple[str, str] | None:
        """Why no request can ever match: (field, sentence). None if some may."""
        if self.request_ids is not None and not self.request_ids:
            return "request_ids", "request_ids is empty: name at least one request, or leave the field out."
        for name in ("tokens", "age_s", "kv_blocks"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                return f"min_{name}", f"min_{name} is {least} and max_{name} {most}: the minimum must not be larger."
        return None

    def matches(self, row: Row) -> bool:
        tokens = int(row.get("prompt_tokens") or 0) + int(row.get("output_tokens") or 0)
        named = {str(row.get("request_id")), str(row.get("stream_id"))}
        return (
            (self.request_ids is None or not named.isdisjoint(self.request_ids))
            and _within(tokens, self.min_tokens, self.max_tokens)
            and _within(float(row.get("age_s") or 0.0), self.min_age_s, self.max_age_s)
            and _within(int(row.get("kv_blocks") or 0), self.min_kv_blocks, self.max_kv_blocks)
            and (self.model is None or row.get("model") == self.model)
            and (self.api_key is None or row.get("api_key") == self.api_key)
        )

    def unmatched_ids(self, rows: list[dict[str, Any]]) -> list[str]:
        """Ids that were asked for and belong to no row."""
        known = {str(row.get(name)) for row in rows for name in ("request_id", "stream_id")}
        return [one for one in self.request_ids or () if one not in known]

    def describe(self) -> str:
        """For people; "" without any condition."""
        parts = []
        if self.request_ids is not None:
            count = len(self.request_ids)
            parts.append("1 request by its id" if count == 1 else f"{count} requests by their ids")
        for name, word in (("tokens", "tokens"), ("age_s", "s old"), ("kv_blocks", "KV blocks")):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None:
                parts.append(f"{least:g} to {most:g} {word}")
            elif least is not None:
                parts.append(f"at least {least:g} {word}")
            elif most is not None:
                parts.append(f"at most {most:g} {word}")
        if self.model is not None:
            parts.append(f"model {self.model}")
        if self.api_key is not None:
            parts.append(f"API key {self.api_key}")
        return ", ".join(parts)


def _within(value: float, least: float | None, most: float | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)
