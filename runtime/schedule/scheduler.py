"""Scheduler: which sequences the next launch computes, and what its tokens mean for them. Imports no JAX.

Host bookkeeping only: it never sees an array. `schedule` may be called again before the plan before it is collected;
what is launched but not yet read is counted, not known. Plans are collected in the order in which they were made.

Why rows and pages are freed at once, even while a launched step still uses them: the device runs steps in launch order. Who
gets a page or row next is launched later, so the old step's writes land before the new owner writes, and that reads only
positions it has written itself, or full pages of the prefix cache, that no launched step writes after the one that filled them.
Tokens are attributed through the plan, not through the row.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from runtime.errors import InvalidRequest
from runtime.request import FinishReason, Request
from runtime.schedule.plan import Phase, ScheduledChunk, StepLimits, StepPlan, StepResult
from runtime.schedule.policy import SchedulePolicy, choose_decode_steps, choose_phase, is_held
from runtime.schedule.request_checks import check_length
from runtime.schedule.sequence import Sequence, SequenceStatus
from runtime.schedule.sequence_pages import SequencePages
from runtime.schedule.waiting_line import WaitingLine, alike_first, line_order
from runtime.schedule.wish import Share, Wish


class Scheduler:
    """Continuous batching with chunked prefill and preemption. Owned by the engine's thread.

    `limits` is asked at each step. Stop ids of a request are its `stop_token_ids`, and `eos_token_ids` unless it
    ignores them; the device must use the same. The line is unbounded here: the AdmissionGate bounds it.
    `first_row`: rows are numbered from there; `pages` and `sequences` are read by the line of several shards (shards.py).
    """

    def __init__(
        self,
        *,
        page_size: int,
        num_pages: int,
        num_rows: int,
        max_context: int,
        enable_prefix_cache: bool,
        limits: Callable[[], StepLimits],
        clock: Callable[[], float] = time.monotonic,
        eos_token_ids: frozenset[int] = frozenset(),
        policy: SchedulePolicy | None = None,
        first_row: int = 0,
    ) -> None:
        self.page_size = page_size
        self.num_rows = num_rows
        self.max_context = max_context
        self.policy = policy or SchedulePolicy()  # live
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens looked up
        self.prefix_hits = 0  # tokens found
        self._limits = limits
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self.pages = SequencePages(num_pages, page_size, enable_prefix_cache)
        self.sequences: dict[str, Sequence] = {}  # waiting and running, by request id
        self._waiting = WaitingLine()
        self._running: dict[str, Sequence] = {}  # by request id; the row that decoded longest ago comes first
        self._rows = range(first_row, first_row + num_rows)
        self._free_rows = list(self._rows)  # a heap: low rows first
        self._in_flight: deque[StepPlan] = deque()
        self._num_added = 0
        self._prefills_in_a_row = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Plans made but not collected."""
        return len(self._in_flight)

    @property
    def num_used_pages(self) -> int:
        return self.pages.allocator.num_used

    @property
    def num_cached_pages(self) -> int:
        return self.pages.allocator.num_kept

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._running or self._in_flight)

    @property
    def oldest_arrival_s(self) -> float | None:
        """When the oldest request in line arrived that has never run."""
        return self._waiting.oldest_arrival_s

    def set_prefix_cache(self, enabled: bool) -> None:
        """Switch prefix sharing; off forgets what is cached."""
        self.pages.set_prefix_cache(enabled)

    def clear_prefix_cache(self) -> None:
        """Forget cached prefixes, because weights or KV have changed under them; running sequences offer theirs no more."""
        self.pages.forget(self.sequences.values())

    def add(self, request: Request) -> Sequence:
        """Put a request in line. Raises ContextTooLong or InvalidRequest, and then keeps nothing."""
        if request.request_id in self.sequences:
            raise InvalidRequest(f"request id {request.request_id} is in use", param="request_id")
        check_length(request, self.max_context)
        sequence = Sequence(request, number=self._num_added)
        self.pages.check_fits(sequence)
        self._num_added += 1
        self.adopt(sequence)
        return sequence

    def adopt(self, sequence: Sequence) -> None:
        self.sequences[sequence.request_id] = sequence
        self._waiting.add(sequence)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Sequence | None:
        """End a request now; None if it is unknown or has ended."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self.finish(sequence, reason)
        return sequence

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and free its row and pages (see the module's first lines). Tokens of its launches that
        are still in flight will be ignored. Does nothing if it has ended."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        else:
            self._leave_row(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.num_pending = 0
        del self.sequences[sequence.request_id]

    def expire(self, now: float) -> list[Sequence]:
        """End, with reason ERROR, the requests whose deadline passed before they first ran."""
        fresh = (s for s in self._waiting if s.first_scheduled_s is None)
        late = [s for s in fresh if s.request.deadline_s is not None and s.request.deadline_s <= now]
        for sequence in late:
            self.finish(sequence, FinishReason.ERROR)
        return late

    def schedule(self) -> StepPlan | None:
        """Plan of the next launch, which must be launched before the next call; None if there is none now.

        None with plans in flight means: collect, then ask again.
        """
        wish = self.wish()
        in_a_row = self._prefills_in_a_row
        ready = {"can_prefill": bool(wish.shares), "can_decode": wish.can_decode}
        phase = choose_phase(self.policy, **ready, prefills_in_a_row=in_a_row)
        if phase is not None:
            self._prefills_in_a_row = in_a_row + wish.can_decode if phase is Phase.PREFILL else 0
        plan = self.carry_out(wish, phase)
        if plan is None and phase is Phase.DECODE and not self._has_pending():
            wish = replace(wish, shares=tuple(self._decide_prefill(wish.limits)))
            plan = self.carry_out(wish, Phase.PREFILL)
        return plan

    def wish(self, someone_decodes: bool = False) -> Wish:
        """What could be launched now; changes nothing. someone_decodes: rows elsewhere that a prefill would stall."""
        limits = self._limits()
        shares = self._decide_prefill(limits)
        rows = self._decodable(limits)
        is_held = bool(shares) and (rows or someone_decodes) and self._is_held(shares, limits)
        return Wish(() if is_held else tuple(shares), rows, bool(shares), limits)

    def wanted_steps(self, wish: Wish) -> int:
        """Decode steps that the next launch would make if pages allow."""
        return self._decode_steps(wish.rows, wish.limits, is_prefill_near=wish.is_prefill_near)

    def carry_out(self, wish: Wish, phase: Phase | None) -> StepPlan | None:
        """The plan of that phase, to be launched before the next wish; None where there is nothing, or no page."""
        plan: StepPlan | None = None
        if phase is Phase.PREFILL and wish.shares:
            plan = self._plan_prefill(wish.shares)
        elif phase is Phase.DECODE:
            plan = self._make_room_and_plan_decode(wish)
        if plan is not None:
            self._in_flight.append(plan)
        return plan

    def collect(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Take in the tokens of the oldest plan in flight; the new tokens of each sequence still alive.

        A sequence that met a stop id or its budget has `finish_reason` set and is in the list a last time.
        """
        if not self._in_flight or self._in_flight[0] is not plan:
            raise ValueError("plans are collected in the order in which they were made")
        if len(result.token_ids) != len(plan.chunks):
            raise ValueError(f"{len(result.token_ids)} token lists for {len(plan.chunks)} chunks")
        self._in_flight.popleft()
        news: list[tuple[Sequence, tuple[int, ...]]] = []
        for chunk, token_ids in zip(plan.chunks, result.token_ids, strict=True):
            if not chunk.samples or chunk.sequence.status is SequenceStatus.FINISHED:
                continue
            promised = chunk.num_tokens if plan.phase is Phase.DECODE else 1
            news.append((chunk.sequence, self._take_tokens(chunk.sequence, token_ids[:promised], promised)))
        return news

    def check_integrity(self) -> None:
        """Raises AssertionError if rows, pages, line and statuses do not account for each other."""
        self._waiting.check_integrity()
        self.pages.check_integrity(self._running.values())
        rows = [s.row for s in self._running.values() if s.row is not None]
        assert sorted(self._free_rows + rows) == list(self._rows), "a row is lost or used twice"
        alive = {s.request_id: s for s in (*self._waiting, *self._running.values())}
        assert alive == self.sequences, "a sequence is neither waiting nor running, or both"
        for s in alive.values():
            s.check_integrity(is_waiting=s in self._waiting)
        if not self._in_flight:
            assert not self._has_pending(), "tokens are pending but nothing is in flight"

    # Prefill

    def _decide_prefill(self, limits: StepLimits) -> list[Share]:
        """Fill the budget with chunks: first of sequences half way through, then of the line, in order.

        A sequence of the line that could share a page which another one is about to compute stays in line until that page is
        launched; its row and pages are set aside, so that nobody who passes it can keep it waiting.
        """
        budget = limits.max_prefill_tokens // self.page_size  # in pages, as chunks are aligned to pages
        max_shares = min(limits.max_prefill_rows, self.policy.micro_batch_size)
        max_running = min(max(1, self.policy.batch_size), self.num_rows)
        shares: list[Share] = []
        to_compute: set[bytes] = set()

        def add_share(sequence: Sequence, start: int, end: int, cached: list[int] | None) -> None:
            nonlocal budget
            end = min(end, start + budget * self.page_size)
            budget -= self.pages.num_pages(end - start)
            shares.append(Share(sequence, start, end, cached))

        for sequence in self._running.values():
            if sequence.is_prefilling:
                to_compute.update(self.pages.names_to_compute(sequence))
                if budget > 0 and len(shares) < max_shares:
                    add_share(sequence, sequence.num_scheduled, sequence.prefill_end, None)

        num_running = self.num_running
        num_free = self.pages.num_free
        for sequence in alike_first(self._waiting, self.policy):
            if budget <= 0 or len(shares) >= max_shares or num_running >= max_running:
                break
            cached, next_name = self.pages.match(sequence)
            num_free -= self.pages.admission_cost(sequence, cached)
            if num_free < self.policy.spare_pages_per_row * num_running:
                break
            num_running += 1
            if next_name in to_compute:
                continue
            to_compute.update(sequence.page_hashes[len(cached) :])
            add_share(sequence, len(cached) * self.page_size, sequence.prefill_len, cached)
        return shares

    def _is_held(self, shares: list[Share], limits: StepLimits) -> bool:
        """Whether a prefill waits to get fuller while rows decode: for company that may come, or for rows that end."""
        if any(s.cached is None or s.sequence.first_scheduled_s is not None for s in shares):
            return False
        num_tokens = sum(s.end - s.start for s in shares)
        max_running = min(self.policy.batch_size, self.num_rows)
        max_shares = min(limits.max_prefill_rows, self.policy.micro_batch_size)
        if len(shares) >= max_shares or num_tokens >= limits.max_prefill_tokens:
            return False
        if len(shares) < len(self._waiting):  # rows or pages are short
            return num_tokens < self.policy.min_prefill_tokens and 2 * self.num_running >= max_running
        is_full = self.num_running + len(shares) >= max_running
        oldest_s = min((s.sequence.request.arrival_s for s in shares), default=0.0)
        return is_held(self.policy, is_full=is_full, longest_wait_s=self._clock() - oldest_s)

    def _plan_prefill(self, shares: tuple[Share, ...]) -> StepPlan:
        for share in shares:
            if share.cached is not None:
                self.pages.attach(share.sequence, share.cached)
        for share in shares:
            if share.cached is not None:
                self._admit(share.sequence, num_cached=share.start)
        chunks = tuple(
            ScheduledChunk.launch(s.sequence, s.end - s.start, samples=s.end == s.sequence.prefill_end)
            for s in shares
        )
        for share in shares:
            share.sequence.num_scheduled = share.end
            share.sequence.num_pending += share.end == share.sequence.prefill_end
            self.pages.offer(share.sequence)
        return StepPlan(Phase.PREFILL, chunks)

    def _admit(self, sequence: Sequence, num_cached: int) -> None:
        self._waiting.remove(sequence)
        self._running[sequence.request_id] = sequence
        self.pages.grow(sequence, sequence.prefill_len)
        sequence.status = SequenceStatus.RUNNING
        sequence.row = heapq.heappop(self._free_rows)
        sequence.is_row_new = True
        sequence.prefill_end = sequence.prefill_len
        sequence.num_scheduled = num_cached
        if self.pages.can_match(sequence):
            self.prefix_queries += sequence.prefill_len
            self.prefix_hits += num_cached
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = self._clock()
            sequence.num_cached = num_cached

    # Decode

    def _decodable(self, limits: StepLimits) -> tuple[Sequence, ...]:
        """Rows of the next decode step, those that decoded longest ago first."""
        ready = [s for s in self._running.values() if not s.is_prefilling and s.remaining > 0]
        return tuple([s for s in ready if not s.needs_host][: limits.max_decode_rows])

    def _make_room_and_plan_decode(self, wish: Wish) -> StepPlan | None:
        """Decode with the most steps whose pages are free, preempting where not even one step's are.

        Before anyone is preempted everything in flight is collected: some rows may have ended and given pages back, and only
        then can every row be chosen. Each preemption leaves fewer running, and the oldest always stays and fits: this ends.
        """
        rows = wish.rows
        while rows:
            steps = self._decode_steps(rows, wish.limits, is_prefill_near=wish.is_prefill_near)
            while steps > 0 and self._num_missing(rows, steps) > self.pages.num_free:
                steps -= 1
            if steps > 0:
                return self._plan_decode(rows, steps)
            if self._has_pending():
                return None
            self._preempt(self._cheapest_to_preempt())
            rows = self._decodable(wish.limits)
        return None

    def _decode_steps(self, rows: tuple[Sequence, ...], limits: StepLimits, *, is_prefill_near: bool) -> int:
        if any(s.request.params.grammar is not None for s in rows):
            return 1  # the mask of the next token depends on this one
        max_steps = limits.max_decode_steps
        if is_prefill_near or any(s.needs_host for s in self._running.values()):
            max_steps = min(max_steps, self.policy.steps_while_waiting)
        elif self._waiting:
            # The line moves when a row ends: read the tokens when the first row may have ended.
            max_steps = min(max_steps, max(self.policy.steps_while_waiting, min(s.remaining for s in rows)))
        return choose_decode_steps(self.policy, [s.remaining for s in rows], max_steps)

    def _num_missing(self, rows: tuple[Sequence, ...], steps: int) -> int:
        return sum(self.pages.num_missing(s, s.num_scheduled + min(steps, s.remaining)) for s in rows)

    def _plan_decode(self, rows: tuple[Sequence, ...], steps: int) -> StepPlan:
        for sequence in rows:
            self.pages.grow(sequence, sequence.num_scheduled + min(steps, sequence.remaining))
            del self._running[sequence.request_id]
            self._running[sequence.request_id] = sequence  # to the end of the round
        by_row = sorted(rows, key=lambda s: s.row or 0)
        chunks = tuple(ScheduledChunk.launch(s, min(steps, s.remaining), samples=True) for s in by_row)
        for chunk in chunks:
            chunk.sequence.num_scheduled += chunk.num_tokens
            chunk.sequence.num_pending += chunk.num_tokens
        return StepPlan(Phase.DECODE, chunks, num_steps=steps)

    def _cheapest_to_preempt(self) -> Sequence:
        """The sequence that loses the least work, the latest among equals; never the first of the line's order."""
        first = min(self._running.values(), key=lambda s: line_order(s)[1:])
        others = (s for s in self._running.values() if s is not first)
        return min(others, key=lambda s: (self.pages.num_lost(s), [-k for k in line_order(s)[1:]]))

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the line with outputs kept; its pages stay findable until they are needed."""
        self._leave_row(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_scheduled = 0
        sequence.prefill_end = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(sequence)

    # Both

    def _take_tokens(self, sequence: Sequence, token_ids: tuple[int, ...], promised: int) -> tuple[int, ...]:
        num_taken, reason = sequence.take(token_ids, promised, self._eos_token_ids)
        self.pages.offer(sequence)
        if reason is not None:
            self.finish(sequence, reason)
        return token_ids[:num_taken]

    def _leave_row(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        del self._running[sequence.request_id]
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = None
        self.pages.release(sequence)

    def _has_pending(self) -> bool:
        return any(s.num_pending for s in self._running.values())
