"""LaunchWatch: waits for what a follower has launched, so that an error in a step's run is not lost.

A launch returns before it has run, and a follower reads nothing of what it yields. An error on its devices would show at
the next command that uses the arrays; host 0, which waits for this step's result, sends none.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import jax


class LaunchWatch:
    """Its thread waits, so the next launch need not."""

    def __init__(self, on_failure: Callable[[Exception], object]) -> None:
        """on_failure: called once, in the watch's thread, with the first error."""
        self._on_failure = on_failure
        self._launched: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="launch-watch", daemon=True).start()

    def add(self, result: Any) -> None:
        """A tree of arrays that a launch yields and that no later step replaces."""
        self._launched.put(result)

    def _wait(self) -> None:
        try:
            while True:
                jax.block_until_ready(self._launched.get())
        except Exception as error:
            self._on_failure(error)
