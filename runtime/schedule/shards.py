"""ShardedScheduler: one Scheduler for each shard of rows and pages, and one line in front of them. Imports no JAX.

A sequence belongs to one shard from its admission on, because its pages lie there. It is bound as late as possible:
it waits in the common line until some shard has a row for it, and then goes to the one that knows most of its prefix,
or has the fewest rows. All shards compute the same phase in one launch, as the step is one program for all devices.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from runtime.errors import InvalidRequest
from runtime.request import FinishReason, Request
from runtime.schedule.plan import Phase, StepLimits, StepPlan, StepResult
from runtime.schedule.policy import SchedulePolicy, choose_phase
from runtime.schedule.request_checks import check_length
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import Sequence, SequenceStatus
from runtime.schedule.waiting_line import WaitingLine
from runtime.schedule.wish import Wish


class ShardedScheduler:
    """Has the face of Scheduler. num_pages and num_rows are those of one shard, limits those of all together."""

    def __init__(
        self,
        num_shards: int,
        *,
        page_size: int,
        num_pages: int,
        num_rows: int,
        max_context: int,
        enable_prefix_cache: bool,
        limits: Callable[[], StepLimits],
        clock: Callable[[], float] = time.monotonic,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.page_size, self.max_context, self.num_rows = page_size, max_context, num_shards * num_rows
        self._policy = SchedulePolicy()
        self._line = WaitingLine()
        self._in_flight: deque[tuple[StepPlan, list[StepPlan | None]]] = deque()
        self._num_added = self._prefills_in_a_row = 0

        def share_of_limits() -> StepLimits:
            whole = limits()
            return StepLimits(
                max_prefill_tokens=whole.max_prefill_tokens // num_shards,
                max_prefill_rows=whole.max_prefill_rows // num_shards,
                max_decode_rows=whole.max_decode_rows // num_shards,
                max_decode_steps=whole.max_decode_steps,
            )

        self.shards = tuple(
            Scheduler(
                page_size=page_size,
                num_pages=num_pages,
                num_rows=num_rows,
                max_context=max_context,
                enable_prefix_cache=enable_prefix_cache,
                limits=share_of_limits,
                clock=clock,
                eos_token_ids=eos_token_ids,
                first_row=shard * num_rows,
            )
            for shard in range(num_shards)
        )

    # What the shards have together

    @property
    def policy(self) -> SchedulePolicy:
        return self._policy

    @policy.setter
    def policy(self, policy: SchedulePolicy) -> None:
        """Numbers of the whole engine; each shard gets its part, rounded up."""
        self._policy, n = policy, len(self.shards)
        part = replace(
            policy,
            batch_size=-(-policy.batch_size // n),
            micro_batch_size=-(-policy.micro_batch_size // n),
            min_prefill_tokens=-(-policy.min_prefill_tokens // n),
        )
        for shard in self.shards:
            shard.policy = part

    @property
    def sequences(self) -> dict[str, Sequence]:
        """Running and waiting ones by request id; those of the common line last, in its order."""
        bound = (s for shard in self.shards for s in shard.sequences.values())
        return {s.request_id: s for s in (*bound, *self._line)}

    @property
    def num_waiting(self) -> int:
        return len(self._line) + sum(s.num_waiting for s in self.shards)

    @property
    def num_running(self) -> int:
        return sum(s.num_running for s in self.shards)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_used_pages(self) -> int:
        return sum(s.num_used_pages for s in self.shards)

    @property
    def num_cached_pages(self) -> int:
        return sum(s.num_cached_pages for s in self.shards)

    @property
    def num_preemptions(self) -> int:
        return sum(s.num_preemptions for s in self.shards)

    @property
    def prefix_queries(self) -> int:
        return sum(s.prefix_queries for s in self.shards)

    @property
    def prefix_hits(self) -> int:
        return sum(s.prefix_hits for s in self.shards)

    @property
    def is_idle(self) -> bool:
        return not (self._line or self._in_flight) and all(s.is_idle for s in self.shards)

    @property
    def oldest_arrival_s(self) -> float | None:
        lines = (self._line.oldest_arrival_s, *(s.oldest_arrival_s for s in self.shards))
        return min((t for t in lines if t is not None), default=None)

    def set_prefix_cache(self, enabled: bool) -> None:
        for shard in self.shards:
            shard.set_prefix_cache(enabled)

    def clear_prefix_cache(self) -> None:
        for shard in self.shards:
            shard.clear_prefix_cache()

    # Requests

    def add(self, request: Request) -> Sequence:
        """Put a request in line. Raises ContextTooLong or InvalidRequest, and then keeps nothing."""
        if any(request.request_id in s.sequences for s in self.shards) or self._in_line(request.request_id):
            raise InvalidRequest(f"request id {request.request_id} is in use", param="request_id")
        check_length(request, self.max_context)
        sequence = Sequence(request, number=self._num_added)
        self.shards[0].pages.check_fits(sequence)
        self._num_added += 1
        self._line.add(sequence)
        return sequence

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Sequence | None:
        """End a request now; None if it is unknown or has ended."""
        sequence = self._in_line(request_id)
        if sequence is not None:
            self.finish(sequence, reason)
            return sequence
        return next((s for shard in self.shards if (s := shard.abort(request_id, reason))), None)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and free what it holds; does nothing if it has ended."""
        if self._in_line(sequence.request_id) is sequence:
            self._line.remove(sequence)
            sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
            return
        for shard in self.shards:
            if shard.sequences.get(sequence.request_id) is sequence:
                shard.finish(sequence, reason)

    def expire(self, now: float) -> list[Sequence]:
        """End, with reason ERROR, the requests whose deadline passed before they first ran."""
        late = [s for s in self._line if s.request.deadline_s is not None and s.request.deadline_s <= now]
        for sequence in late:
            self.finish(sequence, FinishReason.ERROR)
        return [*late, *(s for shard in self.shards for s in shard.expire(now))]

    # Steps

    def schedule(self) -> StepPlan | None:
        """Plan of the next launch, all shards in the same phase; None if there is none now."""
        self._bind()
        wishes = [s.wish() for s in self.shards]
        if can_decode := any(w.can_decode for w in wishes):
            wishes = [w if w.can_decode else s.wish(True) for s, w in zip(self.shards, wishes, strict=True)]
        phase = choose_phase(
            self._policy,
            can_prefill=any(w.shares for w in wishes),
            can_decode=can_decode,
            prefills_in_a_row=self._prefills_in_a_row,
        )
        if phase is None:
            return None
        self._prefills_in_a_row = self._prefills_in_a_row + can_decode if phase is Phase.PREFILL else 0
        plan = self._carry_out(wishes, phase)
        if plan is None and phase is Phase.DECODE and not self._in_flight:
            # No page for one step anywhere: the preempted ones must be computed again first.
            plan = self._carry_out([s.wish() for s in self.shards], Phase.PREFILL)
        return plan

    def collect(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, tuple[int, ...]]]:
        """As Scheduler.collect."""
        if not self._in_flight or self._in_flight[0][0] is not plan:
            raise ValueError("plans are collected in the order in which they were made")
        if len(result.token_ids) != len(plan.chunks):
            raise ValueError(f"{len(result.token_ids)} token lists for {len(plan.chunks)} chunks")
        _, parts = self._in_flight.popleft()
        news: list[tuple[Sequence, tuple[int, ...]]] = []
        first = 0
        for shard, part in zip(self.shards, parts, strict=True):
            if part is not None:
                end = first + len(part.chunks)
                news += shard.collect(part, StepResult(result.token_ids[first:end]))
                first = end
        return news

    def check_integrity(self) -> None:
        """Raises AssertionError if the books of a shard, or of the line, do not add up."""
        self._line.check_integrity()
        for shard in self.shards:
            shard.check_integrity()
        for sequence in self._line:
            assert not any(sequence.request_id in s.sequences for s in self.shards), "in line and in a shard"

    def _carry_out(self, wishes: list[Wish], phase: Phase) -> StepPlan | None:
        if phase is Phase.DECODE:
            wishes = self._in_step(wishes)
        parts = [s.carry_out(w, phase) for s, w in zip(self.shards, wishes, strict=True)]
        made = [part for part in parts if part is not None]
        if not made:
            return None
        chunks = tuple(chunk for part in made for chunk in part.chunks)
        plan = StepPlan(phase, chunks, max(part.num_steps for part in made))
        self._in_flight.append((plan, parts))
        return plan

    def _in_step(self, wishes: list[Wish]) -> list[Wish]:
        """All shards make as many decode steps as the one that wants fewest: the launch ends when all have ended."""
        pairs = [(s, w) for s, w in zip(self.shards, wishes, strict=True) if w.can_decode]
        steps = min(s.wanted_steps(w) for s, w in pairs)
        return [replace(w, limits=replace(w.limits, max_decode_steps=steps)) for w in wishes]

    def _bind(self) -> None:
        """Hand sequences of the line, in order, to shards that have a row for them."""
        for sequence in list(self._line):
            if sum(len(s.sequences) for s in self.shards) >= self._policy.batch_size:
                return
            shard = max(
                (s for s in self.shards if _has_room(s, sequence)),
                key=lambda s: (len(s.pages.match(sequence)[0]), -len(s.sequences)),
                default=None,
            )
            if shard is None:
                return
            self._line.remove(sequence)
            shard.adopt(sequence)

    def _in_line(self, request_id: str) -> Sequence | None:
        return next((s for s in self._line if s.request_id == request_id), None)


def _has_room(shard: Scheduler, sequence: Sequence) -> bool:
    """Whether a further sequence would get a row and pages soon."""
    num_bound, num_pages = len(shard.sequences), shard.pages.num_pages(sequence.prefill_len)
    has_row = num_bound < min(shard.policy.batch_size, shard.num_rows)
    return has_row and (num_bound == 0 or num_pages <= shard.pages.num_free)


type AnyScheduler = Scheduler | ShardedScheduler
