"""Which cut a stream needs."""

from __future__ import annotations

from proxy.cursor import AnswerCut
from proxy.cut import Cut
from proxy.cut_messages import MessagesCut
from proxy.cut_responses import ResponsesCut
from proxy.tags import ClientRequest

__all__ = ["cut_for"]


def cut_for(request: ClientRequest) -> AnswerCut:
    """Returns the client's side of one answer."""
    if request.path == "/v1/messages":
        return MessagesCut()
    if request.path == "/v1/responses":
        return ResponsesCut()
    return Cut(request.wants_token_ids, request.choices, asked=request.reports_token_ids)
