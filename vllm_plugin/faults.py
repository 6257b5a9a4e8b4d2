"""Test switch: makes a running engine misbehave in named ways, so that tests can show that they would notice.

Off unless the instance was started with VLLM_HI_ENABLE_FAULTS=1; then `POST /vllm_hi/faults` sets the fields below.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from vllm_plugin.link import Link

__all__ = ["Faults", "Said"]

#: What B says to A or to a proxy worker: its answers to `Grow`, `Prepare` and `Commit`, and two notices.
Said = Literal["parked", "grown", "prepared", "committed", "producing"]


class Faults(msgspec.Struct):
    """What can be made to go wrong. Times are in seconds.

    Attributes:
        skip_tail: the partial last block is not sent at handover.
        drop_generator: a fresh random state is sent instead of the request's.
        drop_output_split: B's model runner takes the output so far for a part of the prompt.
        drop_replay_tail: B's front end is not told the last token of the output so far.
        drop_logprobs: the logprobs of A's tokens stay behind; zeros are sent.
        drop_lora: B's model runner is not told the request's LoRA adapter.
        hold_round_s, hold_before_freeze_s, hold_before_commit_s: A waits there: after each round, after B's promise of
            a run slot, and between the tail and the commit.
        hold_commit_s: B has a commit and waits before it looks at it.
        late: how much later B says something than it should; a negative time means never.
        refuse_commit: B refuses every commit.
        skip_grammar: B does not replay a grammar.
        step_delay_s: each step of the engine takes so much longer.
    """

    skip_tail: bool = False
    drop_generator: bool = False
    drop_output_split: bool = False
    drop_replay_tail: bool = False
    drop_logprobs: bool = False
    drop_lora: bool = False
    hold_round_s: float = 0.0
    hold_before_freeze_s: float = 0.0
    hold_before_commit_s: float = 0.0
    hold_commit_s: float = 0.0
    late: dict[Said, float] = {}
    refuse_commit: bool = False
    skip_grammar: bool = False
    step_delay_s: float = 0.0

    def say(self, what: Said, link: Link, message: msgspec.Struct) -> None:
        """Sends a message of B, at once unless `late` says otherwise."""
        delay = self.late.get(what, 0.0)
        if delay == 0:
            link.send(message)
        elif delay > 0:
            timer = threading.Timer(delay, link.send, (message,))
            timer.daemon = True
            timer.start()

    def slow_down(self, scheduler: Any) -> None:
        """Makes the steps of this engine as slow as `step_delay_s` says, or as fast as they were."""
        vars(scheduler).pop("schedule", None)
        if not self.step_delay_s:
            return
        schedule, delay = scheduler.schedule, self.step_delay_s

        def delayed(*args: Any, **kwargs: Any) -> Any:
            time.sleep(delay)
            return schedule(*args, **kwargs)

        scheduler.schedule = delayed
