"""Engine: launches a StepPlan and collects its tokens. No threads, no policy.

A launch returns at once; its tokens are read by `collect`, normally after the next step was launched. The arrays are
DeviceWork's, which is told what to do by commands; on several hosts the others get the same commands first.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol
from zlib import crc32

import jax
import numpy as np

from runtime.adaptive.form_judge import Turn
from runtime.engine.device_commands import (
    CompileRungs,
    DeviceCommand,
    KeepRungs,
    LeanRouter,
    MoveWeights,
    RunStep,
    ScorePrompt,
    SetBalanceWeight,
    SetMask,
    SetSlots,
    WakeWeights,
    WriteRow,
)
from runtime.engine.device_work import DeviceWork
from runtime.engine.launched import NO_ROWS, CollectedStep, InFlightStep, read_tokens
from runtime.engine.score_reading import ScoreChunk, read_logprobs, read_scores
from runtime.engine.step_forms import StepForms
from runtime.experts.move_order import order_of
from runtime.ladder.batch import DECODE_HEADER, pack, packed_len
from runtime.ladder.bucket import Bucket
from runtime.ladder.ladder import BucketLadder
from runtime.ladder.shard_packing import columns_of, pack_shards, rung_size, split_plan
from runtime.ladder.step import SCORE_CHUNK, StepShape
from runtime.ladder.step_profile import profile_scopes
from runtime.mesh import DeviceMesh
from runtime.model.architecture import Architecture
from runtime.model.halves import keys_of_linear_part
from runtime.model.sampling import pack_row
from runtime.schedule.plan import Phase, ScheduledChunk, StepLimits, StepPlan, StepResult


class Followers(Protocol):
    """The other hosts of an engine."""

    def send(self, command: DeviceCommand) -> None:
        """To all of them, in the order of the calls. Raises HostGone."""

    def give_up(self, error: str) -> None:
        """What was sent cannot be carried out here: the hosts have parted."""


class Engine:
    """Not thread-safe: one thread owns it."""

    def __init__(
        self,
        arch: Architecture,
        shape: StepShape,
        ladder: BucketLadder,
        work: DeviceWork,
        eos_ids: tuple[int, ...],
        followers: Followers | None = None,
    ) -> None:
        """shape: of one shard. followers: hosts that carry out each command too; None: this process is alone."""
        self.arch, self.shape, self.ladder = arch, shape, ladder
        self.compiler, self._work, self._followers = work.compiler, work, followers
        self._eos_ids = eos_ids
        self._max_decode_steps = 1
        self._warm: set[Bucket] = set()
        self._only_decode_rows: int | None = None
        self.forms = StepForms(keys_of_linear_part(arch))  # of rungs that are compiled in halves too
        self._has_launched = False
        self.scope_shares: dict[str, Mapping[str, float]] = {}  # by rung, of those that were profiled

    @property
    def mesh(self) -> DeviceMesh | None:
        """Of several devices, which the compiled functions are for."""
        return self._work.mesh

    @property
    def num_shards(self) -> int:
        """Shards of rows and pages, each on devices of its own."""
        return self.mesh.num_shards if self.mesh is not None else 1

    def set_max_decode_steps(self, steps: int) -> None:
        self._max_decode_steps = steps

    def restrict_decode(self, rows: int | None) -> None:
        """Use the decode rung of so many rows and no other, as a server with one fixed batch size would; None: all.

        Raises ValueError when there is no such rung.
        """
        if rows is not None and rows not in {b.rows for b in self.ladder.decode}:
            raise ValueError(
                f"no decode rung has {rows} rows; there are {[b.rows for b in self.ladder.decode]}"
            )
        self._only_decode_rows = rows

    def set_ladder(self, ladder: BucketLadder) -> None:
        """Replace the ladder between two steps; all its rungs must be warm."""
        self.ladder = ladder
        if self._only_decode_rows not in {b.rows for b in ladder.decode}:
            self._only_decode_rows = None

    def keep_rungs(self, buckets: tuple[Bucket, ...]) -> None:
        """Forget and free every rung but these."""
        self._warm &= set(buckets)
        self.forms.keep(self._warm)
        self._do(KeepRungs(buckets))

    def compile(self, buckets: Iterable[Bucket]) -> None:
        """Start to compile what is missing of these rungs, on all hosts."""
        self._do(CompileRungs(tuple(buckets)))

    @property
    def num_pages(self) -> int:
        """Pages that requests can hold, and a dummy page."""
        return self._work.state.pool.num_pages - self.num_shards + 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self._work.state.pool.nbytes // self._work.state.pool.num_pages

    @property
    def num_row_slots(self) -> int:
        """Rows that the device has room for, over all shards."""
        return self.num_shards * self.shape.num_slots

    @property
    def max_prefill_tokens(self) -> int:
        """Tokens of the widest prefill rung that the arrays have room for, over all shards."""
        return self.num_shards * self.shape.max_prefill_tokens

    @property
    def can_serve(self) -> bool:
        """Whether a rung of each phase is ready."""
        return bool(self.usable(Phase.PREFILL) and self.usable(Phase.DECODE))

    def adopt_ready_rungs(self) -> bool:
        """Warm up at most one newly compiled rung; True when no rung is left to wait for."""
        is_settled = self.compiler.is_settled  # asked first: a rung may get ready while we look
        for bucket in self.ladder.rungs:
            if bucket not in self._warm and self.compiler.is_ready(bucket):
                self.adopt(bucket)
                return False
        return is_settled

    def adopt(self, bucket: Bucket) -> None:
        """Warm up a compiled rung, of this ladder or of the next one."""
        self.warm_up(bucket)
        if not self._has_launched:  # before traffic only: nobody waits for the profile then
            program = self.compiler.program(bucket.name)
            self.scope_shares[bucket.name] = profile_scopes(lambda: self.warm_up(bucket), program)
        if (halves := self.compiler.in_halves(bucket)) is not None:
            self.forms.measure(bucket, halves, self.warm_up)
        self._warm.add(bucket)

    def is_warm(self, bucket: Bucket) -> bool:
        return bucket in self._warm

    def usable(self, phase: Phase) -> list[Bucket]:
        """The rungs of the ladder that may be launched now, ascending."""
        return [b for b in self.ladder.of(phase) if self._is_usable(b)]

    def _is_usable(self, bucket: Bucket) -> bool:
        is_allowed = bucket.phase is Phase.PREFILL or self._only_decode_rows in (None, bucket.rows)
        return is_allowed and bucket in self._warm

    def limits(self) -> StepLimits:
        """What the ready rungs can take now."""
        prefill, decode = self._largest(Phase.PREFILL), self._largest(Phase.DECODE)
        return StepLimits(
            max_prefill_tokens=prefill.tokens if prefill is not None else 0,
            max_prefill_rows=prefill.rows if prefill is not None else 0,
            max_decode_rows=decode.rows if decode is not None else 0,
            max_decode_steps=self._max_decode_steps,
        )

    def _largest(self, phase: Phase) -> Bucket | None:
        """The last of `usable`, found from that end: it is asked for at each step."""
        return next((b for b in reversed(self.ladder.of(phase)) if self._is_usable(b)), None)

    def launch(self, plan: StepPlan, masks: Mapping[int, np.ndarray]) -> InFlightStep:
        """Start a step. `masks` holds the grammar bit mask of each row in the plan that has one."""
        self._has_launched = True
        parts = self._parts(plan)
        size, rows = rung_size(parts, self.shape.page_size)
        bucket = self.ladder.pick(plan.phase, size, rows, self._is_usable)
        for chunk in plan.chunks:
            if chunk.is_new_row:
                self._write_row(chunk)
        for row, mask in masks.items():
            self._do(SetMask(self._slot_of(row)[..., None], mask.reshape(1, -1)))
        sizes = {"page_size": self.shape.page_size, "pages_per_row": self.shape.pages_per_row}
        if self.mesh is None:
            packed = pack(plan, bucket, dummy_slot=self.shape.dummy_slot, **sizes)
        else:
            packed = pack_shards(parts, bucket, num_slots=self.shape.num_slots, **sizes)
        return self._run(plan, bucket, packed, size, self.forms.turn(bucket))

    def _parts(self, plan: StepPlan) -> list[StepPlan]:
        return [plan] if self.num_shards == 1 else split_plan(plan, self.num_shards, self.shape.num_slots)

    def _slot_of(self, row: int) -> np.ndarray:
        """The row as the compiled writes take it: with several shards, one number each."""
        if self.mesh is None:
            return np.array(row, np.int32)
        shard, slot = divmod(row, self.shape.num_slots)
        slots = np.full(self.num_shards, self.shape.dummy_slot, np.int32)
        slots[shard] = slot
        return slots

    def collect(self, step: InFlightStep) -> CollectedStep:
        """Wait for a launch and read its tokens."""
        plan, counts, scores = step.plan, np.asarray(step.load.tokens), read_scores(step.scores)
        rows = np.asarray(step.load.rows) if self.mesh is not None else NO_ROWS
        asleep = None if step.load.asleep is None else np.asarray(step.load.asleep)
        if step.output is None:
            nothing = tuple(() for _ in plan.chunks)
            return CollectedStep(StepResult(nothing), 1, counts, nothing, scores, rows, asleep)
        tokens, num_steps = read_tokens(np.asarray(step.output.tokens), step.columns)
        logprobs = read_logprobs(step.plan, step.output, step.columns, tokens)
        return CollectedStep(StepResult(tokens), num_steps, counts, logprobs, scores, rows, asleep)

    def move_experts(self, layer: int, source: Mapping[int, int], table: np.ndarray) -> None:
        """Copy experts' weights in place, as `move_order.transfers` says. table: the layer's copies after it, from
        `copies_table`; holds from the next launch on."""
        self._do(MoveWeights(layer, order_of(source, table)))

    def change_slots(self, command: WakeWeights | SetSlots) -> None:
        """Experts of the store into slots, or a table that says so; holds from the next launch on."""
        self._do(command)

    def measure_move(self) -> float:
        """Seconds that the copy of one expert takes, after a first one: warm-up and price in one."""
        layer = self._work.first_expert_layer
        table = np.asarray(self._work.experts(layer).copies)
        for _ in range(2):
            start = time.monotonic()
            self.move_experts(layer, {0: 0}, table)  # slot 0 over itself
            jax.block_until_ready(self._work.state.params.layers[layer].ffn.w_down)
        return time.monotonic() - start

    def set_balance_weight(self, weight: float) -> None:
        """How unequally copies of an expert may share its rows, 0 to 0.5; holds from the next launch on."""
        self._do(SetBalanceWeight(float(weight)))

    def shutdown(self, waits: bool = True) -> None:
        """Start no further compile. waits: for what was launched too; not after a failure, when arrays may be gone."""
        self.compiler.shutdown()
        if waits:
            self.wait_idle()

    def wait_idle(self) -> None:
        """Until all that was launched has run: nothing of this engine is left on devices that another one uses next."""
        s = self._work.state
        jax.block_until_ready((s.params, s.pool, s.rows, s.sampling, s.hidden))

    def lean_router(self, layer: int, bias: np.ndarray) -> None:
        """Add float32 [E] to what steers a layer's choice of experts; zeros take it back. Holds from the next launch on."""
        self._do(LeanRouter(layer, bias))

    def warm_up(self, bucket: Bucket) -> None:
        """Run a rung once on the dummy page and row: code and weights are touched before traffic."""
        share = bucket.share(self.num_shards)
        packed = np.zeros(packed_len(share, self.shape.pages_per_row), np.int32)
        t, r = share.tokens, share.rows
        if bucket.phase is Phase.PREFILL:
            packed[:t] = np.arange(t) * 7919 % self.arch.vocab_size  # spread over experts
            fields = packed[t : t + 5 * r].reshape(5, r)
            fields[0], fields[3] = t, self.shape.dummy_slot
            fields[0, 0], fields[1, 0] = 0, t
        else:
            packed[1] = 1  # one step in which every row is active
            packed[DECODE_HEADER : DECODE_HEADER + r] = self.shape.dummy_slot
        if self.mesh is not None:
            packed = np.tile(packed, (self.num_shards, 1))
        jax.block_until_ready(self._run(StepPlan(bucket.phase, ()), bucket, packed).load)

    def _run(
        self, plan: StepPlan, bucket: Bucket, packed: np.ndarray, size: int = 0, turn: Turn | None = None
    ) -> InFlightStep:
        launched, form = time.monotonic(), self.forms.form(bucket, turn)
        columns = columns_of(plan, bucket, self.num_shards, self.shape.num_slots)
        is_prefill = bucket.phase is Phase.PREFILL
        # A prefill in which no chunk ends samples nothing; the warm-up has no chunks.
        is_sampled = is_prefill and (not plan.chunks or any(c.samples for c in plan.chunks))
        output, load = self._do(RunStep(form.name, is_prefill, packed, bucket.rows if is_sampled else 0))
        scores = self._launch_scores(plan) if is_prefill else ()
        return InFlightStep(plan, bucket, output, scores, load, launched, columns, size, turn)

    def _do(self, command: DeviceCommand) -> Any:
        """On all hosts; what it yields is read here alone."""
        if self._followers is None:
            return self._work.run(command)
        # What compiles is noted here before any host can say that it has it.
        is_about_rungs = isinstance(command, CompileRungs | KeepRungs)
        if not is_about_rungs:
            self._followers.send(command)
        try:
            result = self._work.run(command)
        except Exception as error:
            self._followers.give_up(f"host 0 failed: {type(error).__name__}: {str(error)[:300]}")
            raise
        if is_about_rungs:
            self._followers.send(command)
        return result

    def _write_row(self, chunk: ScheduledChunk) -> None:
        sequence, dense = chunk.sequence, ()
        params, num_known = sequence.request.params, len(sequence.output_ids)
        record = pack_row(
            params,
            default_seed=crc32(sequence.request_id.encode()),
            eos_ids=self._eos_ids,
            num_generated=num_known,
        )
        if params.needs_dense_row:
            vocab = self.arch.vocab_size
            bias, seen = np.zeros(vocab, np.float32), np.zeros(vocab, np.bool_)
            for token_id, value in params.logit_bias:
                bias[token_id] += value
            seen[list(sequence.request.prompt_ids)] = True
            counts = np.bincount(np.asarray(sequence.output_ids, np.int64), minlength=vocab)
            dense = bias, seen, counts.astype(np.int32)
        budget = params.max_tokens - num_known
        self._do(
            WriteRow(
                self._slot_of(chunk.row), budget, np.asarray(record.floats), np.asarray(record.ints), dense
            )
        )

    def _launch_scores(self, plan: StepPlan) -> tuple[ScoreChunk, ...]:
        scores: list[ScoreChunk] = []
        for shard, part in enumerate(self._parts(plan)):
            offset = 0
            for chunk in part.chunks:
                if chunk.sequence.request.params.prompt_logprobs is not None:
                    scores += self._score_chunk(chunk, offset - chunk.start, shard)
                offset += -(-chunk.num_tokens // self.shape.page_size) * self.shape.page_size
        return tuple(scores)

    def _score_chunk(self, chunk: ScheduledChunk, shift: int, shard: int) -> list[ScoreChunk]:
        """Position p of the chunk's sequence stands at p + shift of its shard's hidden states."""
        prompt, scores = chunk.sequence.request.prompt_ids, []
        end = min(chunk.start + chunk.num_tokens, len(prompt) - 1)
        for start in range(chunk.start, end, SCORE_CHUNK):
            num = min(SCORE_CHUNK, end - start)
            targets = np.zeros(SCORE_CHUNK, np.int32)
            targets[:num] = prompt[start + 1 : start + 1 + num]
            shards = () if self.mesh is None else (self.num_shards,)
            outputs = self._do(ScorePrompt(np.full(shards, start + shift, np.int32), targets))
            scores.append(ScoreChunk(chunk.sequence, start + 1, targets, outputs, num, shard * SCORE_CHUNK))
        return scores
