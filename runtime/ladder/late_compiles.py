"""Counts every backend compile that happens outside the ladder's own compile threads, cache loads included.

JAX reports each compile (and each load from its persistent cache) as a monitoring event on the thread that asked
for it. Threads that compile on purpose say so with `expected_compiles`; after `arm` everything else is late.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_BACKEND_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class CompileMonitor:
    """Process-wide counters of compiles; one instance, because JAX's listeners are process-wide."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._is_armed = False
        self._num_late = 0
        self._num_compiles = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @property
    def num_late(self) -> int:
        return self._num_late

    @property
    def num_compiles(self) -> int:
        """All backend compiles seen, expected or not, cache loads included."""
        return self._num_compiles

    def arm(self) -> None:
        """From now on a compile outside `expected_compiles` counts as late."""
        self._is_armed = True

    def disarm(self) -> None:
        """Stop counting and forget; for a new engine in the same process (tests)."""
        with self._lock:
            self._is_armed, self._num_late = False, 0

    @contextmanager
    def expected_compiles(self) -> Iterator[None]:
        """Compiles of this thread within the block are the ladder's own."""
        before = getattr(self._local, "is_expected", False)
        self._local.is_expected = True
        try:
            yield
        finally:
            self._local.is_expected = before

    def take_cache_hits(self) -> int:
        """Loads from the persistent cache by this thread since the last call."""
        hits = getattr(self._local, "cache_hits", 0)
        self._local.cache_hits = 0
        return hits

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event != _BACKEND_COMPILE_EVENT:
            return
        with self._lock:
            self._num_compiles += 1
            if self._is_armed and not getattr(self._local, "is_expected", False):
                self._num_late += 1

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == _CACHE_HIT_EVENT:
            self._local.cache_hits = getattr(self._local, "cache_hits", 0) + 1


monitor = CompileMonitor()
