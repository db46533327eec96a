"""Waiting for what must come: far longer than a busy machine takes, for a wait that ends well costs nothing.

A test that must see that something is *not* awaited compares with a limit of the code under test that is set far longer
than PATIENCE_S, or counts processor time; it does not guess how fast this machine is.
"""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0
LOOK_S = 0.01


def until[T](condition: Callable[[], T | None], patience_s: float = PATIENCE_S) -> T:
    """The first true value of `condition`. Raises AssertionError when none comes within `patience_s`."""
    end_s = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"it has not come true within {patience_s:g} s"
        time.sleep(LOOK_S)
    return found


async def until_async[T](condition: Callable[[], T | None], patience_s: float = PATIENCE_S) -> T:
    """`until` for a test inside an event loop, which goes on meanwhile."""
    end_s = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"it has not come true within {patience_s:g} s"
        await asyncio.sleep(LOOK_S)
    return found
