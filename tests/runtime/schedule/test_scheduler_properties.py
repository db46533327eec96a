"""Random traffic against a fake device that really keeps pages and rows: whatever the order of calls, every request
ends with the tokens it would get alone, and every read finds exactly its own prefix."""

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.errors import QueueFull
from runtime.request import FinishReason, GrammarSpec, Request, SamplingParams
from runtime.schedule.plan import Phase, ScheduledChunk, StepLimits, StepPlan, StepResult
from runtime.schedule.policy import SchedulePolicy
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import Sequence, SequenceStatus
from runtime.schedule.waiting_line import line_order

STOP_ID = 0
VOCAB = 8
PIPELINE_DEPTH = 2
BASES = [[1 + zlib.crc32(bytes([b, i])) % (VOCAB - 1) for i in range(40)] for b in range(3)]


def next_token(token_ids: list[int]) -> int:
    """The fake model: greedy, looks at the whole context, stops once in VOCAB tokens."""
    return zlib.crc32(bytes(token_ids)) % VOCAB


def tokens_alone(request: Request) -> tuple[list[int], FinishReason]:
    """What the request yields with the device to itself."""
    outputs: list[int] = []
    while True:
        outputs.append(next_token([*request.prompt_ids, *outputs]))
        if outputs[-1] == STOP_ID and not request.params.ignore_eos:
            return outputs, FinishReason.STOP
        if len(outputs) == request.params.max_tokens:
            return outputs, FinishReason.LENGTH


@dataclass
class Row:
    """Device state of one row, written when a plan says that the row is new."""

    sequence: Sequence
    token_ids: list[int]
    budget: int
    num_computed: int
    is_masked: bool = False


@dataclass
class FakeDevice:
    """Runs plans in launch order. The KV of a position is a hash of salt and all tokens up to it."""

    page_size: int
    pages: dict[tuple[int, int], int] = field(default_factory=dict)  # (page id, offset) -> KV
    rows: dict[int, Row] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        for chunk in plan.chunks:
            self._set_up_row(chunk)
        if plan.phase is Phase.PREFILL:
            # Every chunk reads before any writes: no chunk may lean on another one of the same step.
            for chunk in plan.chunks:
                self._check_context(chunk, chunk.start)
            return StepResult(tuple(tuple(self._prefill(chunk)) for chunk in plan.chunks))
        results: list[list[int]] = [[] for _ in plan.chunks]
        for step in range(plan.num_steps):
            for index, chunk in enumerate(plan.chunks):
                results[index] += self._decode(chunk, step)
        return StepResult(tuple(map(tuple, results)))

    def _set_up_row(self, chunk: ScheduledChunk) -> None:
        sequence = chunk.sequence
        if chunk.is_new_row:
            known = [*sequence.request.prompt_ids, *sequence.output_ids]
            budget = sequence.request.params.max_tokens - len(sequence.output_ids)
            self.rows[chunk.row] = Row(sequence, known, budget, num_computed=chunk.start)
        row = self.rows[chunk.row]
        assert row.sequence is sequence, "a row was taken over without being set up"
        assert row.is_masked or row.num_computed == chunk.start, "a position is left out or computed twice"

    def _prefill(self, chunk: ScheduledChunk) -> list[int]:
        row = self.rows[chunk.row]
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            self._write(chunk, position)
        row.num_computed += chunk.num_tokens
        assert chunk.samples == (row.num_computed == len(row.token_ids))
        return self._sample(row) if chunk.samples else []

    def _decode(self, chunk: ScheduledChunk, step: int) -> list[int]:
        row = self.rows[chunk.row]
        if row.is_masked:
            return []
        position = len(row.token_ids) - 1
        assert position == row.num_computed == chunk.start + step
        assert step < chunk.num_tokens, "the device has budget left where the host thinks there is none"
        self._check_context(chunk, position)
        self._write(chunk, position)
        row.num_computed += 1
        return self._sample(row)

    def _sample(self, row: Row) -> list[int]:
        token_id = next_token(row.token_ids)
        row.token_ids.append(token_id)
        row.budget -= 1
        ignores_stop = row.sequence.request.params.ignore_eos
        row.is_masked = row.budget == 0 or (token_id == STOP_ID and not ignores_stop)
        return [token_id]

    def _check_context(self, chunk: ScheduledChunk, end: int) -> None:
        kv = self._kv(chunk, end)
        for position in range(end):
            assert self.pages.get(self._slot(chunk, position)) == kv[position], f"foreign KV at {position}"

    def _write(self, chunk: ScheduledChunk, position: int) -> None:
        self.pages[self._slot(chunk, position)] = self._kv(chunk, position + 1)[position]

    def _slot(self, chunk: ScheduledChunk, position: int) -> tuple[int, int]:
        return chunk.page_ids[position // self.page_size], position % self.page_size

    def _kv(self, chunk: ScheduledChunk, end: int) -> list[int]:
        kv, value = [], zlib.crc32(chunk.sequence.request.cache_salt.encode())
        for token_id in self.rows[chunk.row].token_ids[:end]:
            value = zlib.crc32(bytes([token_id]), value)
            kv.append(value)
        return kv


class SchedulerMachine(RuleBasedStateMachine):
    """add / launch / collect / abort / finish / expire and live changes, in any order."""

    first_limits = StepLimits(16, 3, 4, 4)

    def make_scheduler(self, **settings: Any) -> Any:
        return Scheduler(**settings)

    def make_device(self, num_rows: int) -> Any:
        return FakeDevice(self.page_size)

    @initialize(
        pool_tokens=st.integers(12, 64),
        num_rows=st.integers(1, 5),
        page_size=st.sampled_from([1, 2, 4]),
        has_cache=st.sampled_from([True, True, False]),
    )
    def start(self, pool_tokens: int, num_rows: int, page_size: int, has_cache: bool) -> None:
        num_pages = pool_tokens // page_size + 1
        self.now = 0.0
        self.page_size = page_size
        self.limits = self.first_limits
        self.has_cache = has_cache
        self.scheduler = self.make_scheduler(
            page_size=page_size,
            num_pages=num_pages,
            num_rows=num_rows,
            max_context=(num_pages - 1) * page_size,
            enable_prefix_cache=has_cache,
            limits=lambda: self.limits,
            clock=lambda: self.now,
            eos_token_ids=frozenset({STOP_ID}),
        )
        self.device = self.make_device(num_rows)
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.sequences: list[Sequence] = []
        self.seen: dict[str, list[int]] = {}
        self.cut_short: set[str] = set()

    # What the engine and its users do

    @rule(
        base=st.sampled_from(BASES),
        base_len=st.integers(0, 24),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=5),
        max_tokens=st.sampled_from([1, 2, 5, 12, 24]),
        salt=st.sampled_from(["", "", "other"]),
        kind=st.sampled_from([*["plain"] * 4, *["ignore_eos"] * 3, "grammar", "prompt_logprobs"]),
        priority=st.sampled_from([0, 0, 0, 1]),
        patience=st.sampled_from([None, None, 3.0]),
        copies=st.sampled_from([1, 1, 1, 3]),
    )
    def add(self, base, base_len, tail, max_tokens, salt, kind, priority, patience, copies) -> None:
        prompt = (*base[:base_len], *tail)
        room = self.scheduler.max_context - max_tokens
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            grammar=GrammarSpec("regex", ".*") if kind == "grammar" else None,
            prompt_logprobs=0 if kind == "prompt_logprobs" else None,
            ignore_eos=kind == "ignore_eos",
        )
        for _ in range(copies):
            request = Request(
                request_id=f"r{len(self.sequences)}",
                prompt_ids=prompt[: max(1, room)],
                params=params,
                priority=priority,
                deadline_s=None if patience is None else self.now + patience,
                cache_salt=salt,
            )
            if room < 1:
                return
            try:
                self.sequences.append(self.scheduler.add(request))
            except QueueFull:
                return

    @rule(
        base=st.sampled_from(BASES),
        lens=st.lists(st.integers(1, 20), min_size=3, max_size=7),
        kind=st.sampled_from(["plain", "ignore_eos"]),
    )
    def add_burst(self, base, lens, kind) -> None:
        """More long answers than the pool can hold: somebody has to give way."""
        for length in lens:
            self.add(base, length - 1, [1 + length % 3], 24, "", kind, 0, None, 1)

    @rule(
        data=st.data(),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        copies=st.sampled_from([1, 3]),
    )
    def add_next_turn(self, data, tail, copies) -> None:
        """A prompt that begins with an earlier prompt and its answer."""
        answered = [s for s in self.sequences if s.output_ids]
        if answered := [s for s in answered if s.output_ids[-1] == STOP_ID] or answered:
            sequence = data.draw(st.sampled_from(answered[-3:]))
            talk = [*sequence.request.prompt_ids, *sequence.output_ids, *tail]
            self.add(talk, len(talk) - 1, talk[-1:], 2, sequence.request.cache_salt, "plain", 0, None, copies)

    @precondition(lambda self: len(self.in_flight) < PIPELINE_DEPTH)
    @rule()
    def launch(self) -> None:
        line_before = sorted(
            (s for s in self.sequences if s.status is SequenceStatus.WAITING), key=line_order
        )
        running = [s for s in self.sequences if s.status is SequenceStatus.RUNNING]
        plan = self.scheduler.schedule()
        if running:
            oldest = min(running, key=lambda s: (s.request.priority, s.number))
            assert oldest.status is SequenceStatus.RUNNING, "the oldest gave way"
        if plan is None:
            assert self.in_flight or self.scheduler.is_idle, (
                "work is left, nothing is in flight, no plan comes"
            )
            return
        self.check_plan(plan)
        if plan.phase is Phase.PREFILL:
            self.check_order(plan, line_before)
        self.in_flight.append((plan, self.device.run(plan)))

    @precondition(lambda self: self.in_flight)
    @rule()
    def collect(self) -> None:
        self.now += 1.0
        plan, result = self.in_flight.popleft()
        for sequence, token_ids in self.scheduler.collect(plan, result):
            self.seen.setdefault(sequence.request_id, []).extend(token_ids)
            assert self.seen[sequence.request_id] == sequence.output_ids

    @rule(num_rounds=st.integers(4, 30))
    def serve(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            if len(self.in_flight) < PIPELINE_DEPTH:
                self.launch()
            if self.in_flight:
                self.collect()
            self.scheduler.check_integrity()

    @rule(data=st.data())
    def abort(self, data) -> None:
        if alive := [s.request_id for s in self.sequences if s.status is not SequenceStatus.FINISHED]:
            request_id = data.draw(st.sampled_from(alive))
            sequence = self.scheduler.abort(request_id)
            assert sequence is not None
            assert sequence.finish_reason is FinishReason.ABORT
            assert self.scheduler.abort(request_id) is None
            self.cut_short.add(request_id)

    @rule(data=st.data())
    def match_stop_string(self, data) -> None:
        if running := [s for s in self.sequences if s.status is SequenceStatus.RUNNING and s.output_ids]:
            sequence = data.draw(st.sampled_from(running))
            self.scheduler.finish(sequence, FinishReason.STOP)
            self.cut_short.add(sequence.request_id)

    @rule()
    def expire(self) -> None:
        for sequence in self.scheduler.expire(self.now):
            assert sequence.request.deadline_s is not None
            assert sequence.request.deadline_s <= self.now
            assert not sequence.output_ids
            self.cut_short.add(sequence.request_id)

    @rule(
        tokens=st.integers(4, 24),
        rows=st.integers(1, 4),
        decode_rows=st.integers(1, 5),
        steps=st.integers(1, 8),
    )
    def change_limits(self, tokens: int, rows: int, decode_rows: int, steps: int) -> None:
        self.limits = StepLimits(tokens, rows, decode_rows, steps)

    @rule(
        num=st.integers(1, 5),
        micro=st.integers(1, 3),
        in_a_row=st.integers(1, 3),
        spare=st.integers(0, 2),
        window=st.sampled_from([0.0, 2.0]),
        multiple=st.sampled_from([0, 8]),
    )
    def change_policy(
        self, num: int, micro: int, in_a_row: int, spare: int, window: float, multiple: int
    ) -> None:
        self.scheduler.policy = SchedulePolicy(
            max_prefills_in_a_row=in_a_row,
            spare_pages_per_row=spare,
            batch_size=num,
            micro_batch_size=micro,
            batch_window_s=window,
            length_multiple=multiple,
        )

    @rule(enabled=st.sampled_from([True, True, False]))
    def switch_prefix_cache(self, enabled: bool) -> None:
        self.has_cache = enabled
        self.scheduler.set_prefix_cache(enabled)

    # What must hold

    def check_plan(self, plan: StepPlan) -> None:
        size, chunks = self.page_size, plan.chunks
        assert chunks
        assert len({c.row for c in chunks}) == len({c.sequence.request_id for c in chunks}) == len(chunks)
        if plan.phase is Phase.PREFILL:
            assert len(chunks) <= self.limits.max_prefill_rows
            assert sum(-(-c.num_tokens // size) * size for c in chunks) <= self.limits.max_prefill_tokens
            assert plan.num_steps == 1
            for c in chunks:
                assert c.start % size == 0
                assert c.num_tokens >= 1
                if c.is_new_row and c.sequence.request.params.prompt_logprobs is not None:
                    assert c.start == 0
                assert c.samples or c.num_tokens % size == 0
        else:
            assert len(chunks) <= self.limits.max_decode_rows
            assert 1 <= plan.num_steps <= self.limits.max_decode_steps
            for c in chunks:
                assert 1 <= c.num_tokens <= plan.num_steps
                if c.sequence.request.params.grammar is not None:
                    assert plan.num_steps == 1
                    unread = [d for p, _ in self.in_flight for d in p.chunks if d.samples]
                    assert all(d.sequence is not c.sequence for d in unread)
        for c in chunks:
            assert len(c.page_ids) * size >= c.start + c.num_tokens
            assert 0 not in c.page_ids
            written = c.page_ids[c.start // size : (c.start + c.num_tokens - 1) // size + 1]
            others = [s for s in self.sequences if s is not c.sequence]
            assert all(set(s.page_ids).isdisjoint(written) for s in others), "a shared page is written"

    def check_order(self, plan: StepPlan, line_before: list[Sequence]) -> None:
        """Nobody passes the one before, but for a sequence that waits for a page which is being computed."""
        waiting = {s.request_id for s in line_before if s.status is SequenceStatus.WAITING}
        admitted = [s for s in line_before if s.request_id not in waiting]
        if not admitted:
            return
        for sequence in line_before[: line_before.index(admitted[-1])]:
            if sequence.request_id in waiting:
                assert self.has_cache
                head = sequence.request.prompt_ids[: self.page_size]
                assert any(
                    s.request.prompt_ids[: self.page_size] == head
                    and (s.is_prefilling or any(s is c.sequence for c in plan.chunks))
                    for s in self.sequences
                    if s.status is SequenceStatus.RUNNING
                )

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        longest = sum(s.max_len for s in self.sequences)
        for _ in range(100 + 20 * longest):
            if self.scheduler.is_idle:
                break
            if len(self.in_flight) < PIPELINE_DEPTH:
                self.launch()
            self.scheduler.check_integrity()
            if self.in_flight:
                self.collect()
            self.scheduler.check_integrity()
        assert self.scheduler.is_idle, "a request never ends"
        assert self.scheduler.num_used_pages == 0
        for sequence in self.sequences:
            expected, reason = tokens_alone(sequence.request)
            if sequence.request_id in self.cut_short:
                assert sequence.output_ids == expected[: len(sequence.output_ids)]
            else:
                assert (sequence.output_ids, sequence.finish_reason) == (expected, reason)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
