"""SweepPlan: what a sweep measures, clipped to the memory there is, and the configuration it needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.bench.roofline import BYTES, ModelShape
from runtime.bench.running import ENDLESS_QUEUE

PREFILL_STEP = 512  # tokens of the largest prefill rung
SHAPE_TOKENS = 1024
SHAPE_ROWS = (64, 32, 16, 8, 4, 2, 1)
BOUNDARIES = (16, 128, 256)  # a page, and the multiples that a GPU's tiles want
MEMORY_SHARE = 0.8  # of the free memory; the rest is for activations and for what else runs
_CHUNK_ROWS = 16
_SAMPLING_BYTES = 16  # bias, seen, counts and logits of one vocabulary entry of one row
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Batch sizes for decode, (prompts, length) for prefill, single lengths for alignment, and rounds of all."""

    batches: tuple[int, ...]
    input_len: int
    output_len: int
    shapes: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    rounds: int

    def new_tokens(self, num_rows: int) -> int:
        """Tokens asked of each row: `output_len` in company of all rows, and what early rows make before the last joins.

        Prefill steps come two in a row at most, then up to two decode steps: about one token for each prefill step.
        """
        tokens_steps = -(-num_rows * self.input_len // PREFILL_STEP)
        return self.output_len + (max(tokens_steps, -(-num_rows // _CHUNK_ROWS)) if num_rows > 1 else 0)

    @property
    def max_rows(self) -> int:
        return max([*self.batches, *(num for num, _ in self.shapes)])

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        decode = max(self.input_len + self.new_tokens(b) for b in self.batches)
        return max([decode, *(length + 1 for _, length in self.shapes), *(n + 1 for n in self.lengths)])

    @property
    def max_positions(self) -> int:
        """Largest number of KV positions held at once, a page of slack for each row."""
        decode = max(b * (self.input_len + self.new_tokens(b) + 16) for b in self.batches)
        return max([decode, self.longest, *(num * (length + 17) for num, length in self.shapes)])


def make_plan(
    batches: Sequence[int], input_len: int, output_len: int, rounds: int, max_context: int
) -> SweepPlan:
    """The plan for a model of this context. Raises ValueError when the decode cases do not fit into it."""
    if output_len < 16 or input_len < 1 or rounds < 1 or not batches:
        raise ValueError(
            "sweep needs --output of 16 or more, --input, --rounds of 1 or more and a batch size"
        )
    shapes = tuple((n, SHAPE_TOKENS // n) for n in SHAPE_ROWS if SHAPE_TOKENS // n < max_context)
    lengths = tuple(n for b in BOUNDARIES for n in (b, b + 1) if n < max_context)
    plan = SweepPlan(tuple(sorted(set(batches))), input_len, output_len, shapes, lengths, rounds)
    needed = input_len + plan.new_tokens(plan.batches[-1])
    if needed > max_context:
        raise ValueError(
            f"--input {input_len} and --output {output_len} need {needed} positions at {plan.batches[-1]} rows; "
            f"the model has {max_context}"
        )
    return plan


def clip_batches(
    batches: Sequence[int], input_len: int, output_len: int, shape: ModelShape, memory_bytes: int, dtype: str
) -> tuple[int, ...]:
    """The sizes whose weights, KV and sampling rows fit into MEMORY_SHARE of the memory. Raises ValueError when none does."""
    budget = MEMORY_SHARE * memory_bytes - (shape.read(shape.num_experts) + shape.head) * BYTES[dtype]
    plan = SweepPlan(tuple(batches), input_len, output_len, (), (), 1)

    def needed(num_rows: int) -> float:
        positions = num_rows * (input_len + plan.new_tokens(num_rows) + 16)
        kv = positions * shape.num_layers * 2 * shape.kv_dim * BYTES[dtype]
        return kv + num_rows * shape.vocab_size * _SAMPLING_BYTES

    fitting = tuple(b for b in batches if needed(b) <= budget)
    if not fitting:
        raise ValueError(
            f"no batch size of {list(batches)} fits: {memory_bytes / _MIB:.0f} MiB are free, the weights leave "
            f"{max(0.0, budget) / _MIB:.0f} MiB"
        )
    return fitting


def overrides_for(plan: SweepPlan, shape: ModelShape, dtype: str) -> dict[str, Any]:
    """Configuration that the method needs: a rung for every size, no controller, no cache, prefill before decode."""
    positions = max(plan.max_positions, plan.longest) * 1.1
    kv_mib = positions * shape.num_layers * 2 * shape.kv_dim * BYTES[dtype] / _MIB
    return {
        "kv_cache.enable_prefix_cache": False,
        "kv_cache.kv_cache_size": f"{max(16, round(kv_mib) + 1)}MiB",
        "model.max_context": min(shape.max_context, plan.longest + 16),
        "batch_processing.enable_dynamic_batch": False,
        "batch_processing.base_batch_size": plan.max_rows,
        "batch_processing.max_batch_size": plan.max_rows,
        "batch_processing.micro_batch_size": plan.max_rows,
        "batch_processing.max_micro_batch_size": plan.max_rows,
        "batch_processing.dynamic_batch_window": "1ms",
        "controller.ttft_slack": 0,
        "controller.like_lengths": False,
        "ladder.decode_rows": sorted({*plan.batches, plan.max_rows}),
        "ladder.max_prefill_tokens": PREFILL_STEP,
        **ENDLESS_QUEUE,
    }
