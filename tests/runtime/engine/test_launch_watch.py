"""An error in a step's run is told, although nobody reads what the step yields."""

import queue
import threading

import jax.numpy as jnp
import pytest

from runtime.engine.launch_watch import LaunchWatch


class Running:
    """An array that a launch yields, which has not run yet. (Python's callbacks, which could fail, run at once on CPUs.)"""

    def __init__(self, error: str) -> None:
        self._error, self.may_end = error, threading.Event()

    def block_until_ready(self) -> "Running":
        assert self.may_end.wait(10)
        if self._error:
            raise RuntimeError(self._error)
        return self


def test_the_error_of_a_launch_is_told_while_nothing_else_is_launched() -> None:
    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    watch, good, bad = LaunchWatch(errors.put), Running(""), Running("no memory")
    watch.add((None, {"load": good, "rows": jnp.ones(3)}))
    watch.add((jnp.ones(3), {"load": bad}))
    good.may_end.set()
    with pytest.raises(queue.Empty):
        errors.get(timeout=0.05)
    bad.may_end.set()
    assert str(errors.get(timeout=10)) == "no memory"
