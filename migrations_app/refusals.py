"""What a refusal of one request means for the job: it passes by itself, is tried again later, or is for good."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

__all__ = ["FILTERED", "FILTER_FAILED", "LASTING_REFUSALS", "ROOM_REFUSALS", "TRANSIENT_REASONS", "Refused"]

#: Reasons of the source's own request filter: it keeps the request; it does not work.
FILTERED = "filtered"
FILTER_FAILED = "request_filter_failed"

#: Reasons that pass by themselves: such a request is listed again a moment later.
TRANSIENT_REASONS = frozenset(
    {"already_moving", "grammar_not_ready", "incomplete", "preempted", "proxy_unreachable", "seeded_prefill", "staged"}
)
#: Seconds after which a request that found no place on the target is tried again: doubled each time up to the second.
ATTACH_RETRY_S = (0.5, 15.0)
#: Refusals that no waiting changes: of the proxy, for only it has seen the request as the client sent it, and of the
#: way that the operator chose.
LASTING_REFUSALS = frozenset(
    {
        "background",
        "beam_search",
        "best_of",
        "custom_tools",
        "logprobs_follow_events",
        "not_a_movable_route",
        "parser_not_chunk_invariant",
        "previous_response",
        "prompt_logprobs",
        "seeded_recompute",
        "server_tools",
        "target_too_small",
    }
)
#: The target has no room now: such a request is tried again as long as there is time, less and less often.
ROOM_REFUSALS = frozenset({"target_out_of_adapter_slots", "target_out_of_blocks", "target_out_of_run_slots"})


@dataclass
class Refused:
    """When a request that was refused may be tried again, on the monotonic clock."""

    until: float = 0.0
    pause_s: float = ATTACH_RETRY_S[0]

    @property
    def lasting(self) -> bool:
        return self.until == math.inf

    def again(self, code: str) -> None:
        self.until = math.inf if code in LASTING_REFUSALS else time.monotonic() + self.pause_s
        self.pause_s = min(2 * self.pause_s, ATTACH_RETRY_S[1])
