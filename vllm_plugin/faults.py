"""Test switch: makes a running engine misbehave in named ways, so that tests can show that they would notice.

Off unless the instance was started with VLLM_HI_ENABLE_FAULTS=1; then `POST /vllm_hi/faults` sets the fields below.
"""

from __future__ import annotations

import msgspec

__all__ = ["Faults"]


class Faults(msgspec.Struct):
    """What can be made to go wrong.

    Attributes:
        skip_tail: the partial last block is not sent at handover.
        drop_generator: a fresh random state is sent instead of the request's.
        hold_before_freeze_s, hold_before_commit_s: A waits there, in seconds.
        refuse_commit: B refuses every commit.
        skip_grammar: B does not replay a grammar.
    """

    skip_tail: bool = False
    drop_generator: bool = False
    hold_before_commit_s: float = 0.0
    hold_before_freeze_s: float = 0.0
    refuse_commit: bool = False
    skip_grammar: bool = False
