"""AdmissionGate: bounds the line of waiting requests by count and by tokens, from any thread. Imports no JAX.

The counts are the process's own and exact at the moment of entry: a gate that read a metric would overshoot.
"""

import threading
from collections.abc import Callable, Sequence

from runtime.errors import QueueFull
from runtime.request import Request


class AdmissionGate:
    """Counts requests from `enter` (submitted) to `leave` (first scheduled, aborted or failed)."""

    def __init__(self, max_requests: int, max_tokens: int, drain_rate: Callable[[], float]) -> None:
        self._lock = threading.Lock()
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._drain_rate = drain_rate
        self._costs: dict[str, int] = {}
        self._tokens = 0
        self.num_rejected = 0

    def enter(self, requests: Sequence[Request]) -> None:
        """Take all or none. The cost of a request is its whole prompt and output. Raises QueueFull."""
        costs = {r.request_id: cost(r) for r in requests}
        with self._lock:
            num, tokens = len(self._costs) + len(costs), self._tokens + sum(costs.values())
            if self._costs and (num > self._max_requests or tokens > self._max_tokens):
                self.num_rejected += len(requests)
                raise QueueFull(
                    f"the queue holds {len(self._costs)} requests of {self._max_requests} and {self._tokens} tokens "
                    f"of {self._max_tokens}; {len(costs)} more with {sum(costs.values())} tokens do not fit",
                    retry_after_s=self._retry_after_s(),
                )
            self._costs |= costs
            self._tokens = tokens

    def set_limits(self, max_requests: int, max_tokens: int) -> None:
        """From now on; what is in line stays."""
        with self._lock:
            self._max_requests, self._max_tokens = max_requests, max_tokens

    def leave(self, request_id: str) -> None:
        """Idempotent."""
        with self._lock:
            self._tokens -= self._costs.pop(request_id, 0)

    @property
    def num_waiting(self) -> int:
        return len(self._costs)

    @property
    def waiting_tokens(self) -> int:
        return self._tokens

    def _retry_after_s(self) -> float:
        """Time to work off half of the line at the rate of the last minute, 1 to 60 seconds."""
        rate = self._drain_rate()
        return min(60.0, max(1.0, self._tokens / 2 / rate)) if rate > 0 else 5.0


def cost(request: Request) -> int:
    """Tokens that a request may occupy in all."""
    return len(request.prompt_ids) + request.params.max_tokens
