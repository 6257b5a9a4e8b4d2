"""Which cut a stream needs."""

from __future__ import annotations

from proxy.cursor import AnswerCut
from proxy.cut import Cut
from proxy.tags import ClientRequest

__all__ = ["cut_for"]


def cut_for(path: str, request: ClientRequest) -> AnswerCut:
    """Returns the client's side of one answer. `path`: with or without a query string."""
    return Cut(request.wants_token_ids, request.choices)
