"""The interpreter's switch interval is short exactly as long as somebody needs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from vllm_plugin.switching import QUICK_S, Switching


@pytest.fixture
def usual() -> Iterator[float]:
    """Data servers of other tests in this process may hold it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


def test_it_is_quick_for_as_long_as_anybody_holds_it(usual: float):
    switching = Switching()
    switching.hold("one")
    switching.hold("other")
    switching.hold("one")
    assert abs(sys.getswitchinterval() - QUICK_S) < 1e-6
    switching.release("one")
    switching.release("nobody")
    assert abs(sys.getswitchinterval() - QUICK_S) < 1e-6
    switching.release("other")
    assert abs(sys.getswitchinterval() - usual) < 1e-6
    switching.release("other")
    assert abs(sys.getswitchinterval() - usual) < 1e-6
