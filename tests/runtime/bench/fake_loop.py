"""FakeLoop: an engine's loop that answers from a thread of its own, one token for each request a step. No JAX."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from runtime.bench.client import EngineClient
from runtime.bench.roofline import ModelShape
from runtime.bench.running import RunningEngine
from runtime.config import parse_config
from runtime.engine.change import LadderChange, LadderState
from runtime.engine.stats import EngineSnapshot, Histogram, RungSnapshot
from runtime.errors import QueueFull
from runtime.request import FinishReason, Request, TokenEvent
from runtime.schedule.policy import SchedulePolicy

SHAPE = ModelShape(
    vocab_size=1000, max_context=256, num_layers=2, num_experts=8, num_experts_per_tok=2, attention=400, router=80,
    expert=300, head=10_000, query_dim=16, kv_dim=8,
)  # fmt: skip


@dataclass
class Rung:
    """Counters of one fake rung; each launch computes `size` positions."""

    phase: str
    size: int
    hits: int = 0
    real: int = 0


class FakeLoop:
    """Prefills in one step, then decodes all requests together; every step takes `step_s`."""

    def __init__(
        self, step_s: float = 0.001, refuse: Sequence[str] = (), fail_after: int | None = None
    ) -> None:
        self.step_s, self.refuse, self.fail_after = step_s, refuse, fail_after
        self.rungs = {"prefill_64": Rung("prefill", 64), "decode_8": Rung("decode", 8)}
        self.prompts: list[tuple[int, ...]] = []
        self.busy_s, self.num_steps, self.late_compiles = 0.0, 0, 0
        self._publish: Callable[[list[TokenEvent]], None] = lambda events: None
        self._left: dict[str, int] = {}
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set_publisher(self, publish: Callable[[list[TokenEvent]], None], /) -> None:
        self._publish = publish

    def submit(self, requests: Sequence[Request], /) -> None:
        for request in requests:
            if request.request_id in self.refuse:
                raise QueueFull("no room")
            with self._lock:
                self.prompts.append(request.prompt_ids)
                self._left[request.request_id] = request.params.max_tokens
                self.rungs["prefill_64"].hits += 1
                self.rungs["prefill_64"].real += min(64, len(request.prompt_ids))

    def abort(self, request_ids: Sequence[str], /) -> None:
        with self._lock:
            for request_id in request_ids:
                self._left.pop(request_id, None)

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join()

    @property
    def has_failed(self) -> bool:
        return self.fail_after is not None and self.num_steps >= self.fail_after

    def snapshot(self) -> EngineSnapshot:
        return replace(
            EMPTY,
            state="failed" if self.has_failed else "ready",
            error="broken on purpose" if self.has_failed else "",
            busy_s=self.busy_s,
            num_steps=self.num_steps,
            late_compiles=self.late_compiles,
            rungs=tuple(
                RungSnapshot(
                    name,
                    r.phase,
                    r.size,
                    "ready",
                    0.1,
                    False,
                    0,
                    r.hits,
                    r.real,
                    r.hits * r.size,
                    self.step_s,
                )
                for name, r in self.rungs.items()
            ),
        )

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            with self._lock:
                rows = list(self._left)[:8]
            if not rows or self.has_failed:
                time.sleep(self.step_s)
                continue
            start_s = time.monotonic()
            time.sleep(self.step_s)
            events = []
            with self._lock:
                for request_id in rows:
                    self._left[request_id] -= 1
                    is_last = self._left[request_id] == 0
                    if is_last:
                        del self._left[request_id]
                    events.append(
                        TokenEvent(
                            request_id, (5,), "x", finish_reason=FinishReason.LENGTH if is_last else None
                        )
                    )
            self.busy_s += time.monotonic() - start_s
            self.num_steps += 1
            self.rungs["decode_8"].hits += 1
            self.rungs["decode_8"].real += len(rows)
            self._publish(events)


def fake_engine(loop: FakeLoop) -> RunningEngine:
    """A RunningEngine around the fake."""
    config = parse_config({"batch_processing": {"max_batch_size": 8}})
    return RunningEngine(config, EngineClient(loop), SHAPE, "fake", 0.1, 0.2, loop)


_NONE = Histogram((1.0,))
EMPTY = EngineSnapshot(
    state="ready", error="", uptime_s=1.0, num_steps=0, last_step_s=0.0, busy_s=0.0, num_running=0, num_waiting=0,
    waiting_tokens=0, num_pages=8, used_pages=0, cached_pages=0, page_size=16, prompt_tokens=0, generation_tokens=0,
    cached_prompt_tokens=0, prefix_queries=0, prefix_hits=0, num_preemptions=0, finished={}, rejected={},
    late_compiles=0, rungs=(), expert_tokens=(), ttft_s=_NONE, itl_s=_NONE, e2e_s=_NONE, queue_s=_NONE,
    prefill_s=_NONE, decode_s=_NONE, prompt_len=_NONE, generation_len=_NONE, host_step_s=_NONE, drain_rate_tokens_s=0.0,
    ladder_change=LadderChange(0, LadderState.STEADY), policy=SchedulePolicy(), demand={},
)  # fmt: skip
