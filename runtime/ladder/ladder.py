"""BucketLadder: the sorted set of all shapes that are ever compiled, and the rule that picks one. Imports no JAX."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from runtime.config import EngineConfig, ParallelConfig
from runtime.errors import BucketMiss
from runtime.experts.exchange_kind import ExchangeKind
from runtime.ladder.bucket import Bucket, decode_bucket, prefill_bucket
from runtime.schedule.plan import Phase


@dataclass(frozen=True, slots=True)
class BucketLadder:
    """Rungs of both phases, each sorted by size. Immutable: a new ladder replaces an old one whole."""

    prefill: tuple[Bucket, ...]
    decode: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        for rungs, phase in ((self.prefill, Phase.PREFILL), (self.decode, Phase.DECODE)):
            if not rungs or any(b.phase is not phase for b in rungs):
                raise ValueError(
                    f"a ladder needs at least one {phase} rung and only such in its {phase} list"
                )
            if list(rungs) != sorted(set(rungs)):
                raise ValueError(f"{phase} rungs must be sorted and distinct: {[b.name for b in rungs]}")

    @classmethod
    def from_config(cls, config: EngineConfig, max_context: int, row_slots: int | None = None) -> Self:
        """The ladder that the configuration asks for, by explicit lists or by rule.

        `row_slots`: rows that the device has room for, where that is settled already.

        Alignment: prefill sizes are rounded up to whole pages, and with several shards all sizes to equal parts.
        No rung is larger than what can be used.
        """
        page, shards = config.kv_cache.page_size, config.parallel.expert_parallel_size
        max_rows = config.batch_processing.max_batch_size
        largest = min(config.ladder.max_prefill_tokens, _round_up(max_context, page) * max_rows)
        largest = max(largest, page * shards)
        sizes = config.ladder.prefill_tokens or default_prefill_tokens(largest, page)
        rows = config.ladder.decode_rows or default_decode_rows(max_rows)
        aligned = sorted({_round_up(size, page * shards) for size in sizes})
        # A prefill rung never needs more rows than there are row slots.
        slots = row_slots or config.ladder.row_slots or max_rows
        chunk_rows = _round_up(min(config.ladder.max_prefill_rows, slots), shards)
        prefill = (prefill_bucket(t, page, chunk_rows, _exchange(config.parallel, t)) for t in aligned)
        wanted = sorted({_round_up(r, shards) for r in rows})
        return cls(tuple(prefill), tuple(decode_bucket(r, _exchange(config.parallel, r)) for r in wanted))

    @property
    def rungs(self) -> tuple[Bucket, ...]:
        return self.decode + self.prefill

    def of(self, phase: Phase) -> tuple[Bucket, ...]:
        return self.prefill if phase is Phase.PREFILL else self.decode

    def pick(self, phase: Phase, tokens: int, rows: int, is_ready: Callable[[Bucket], bool]) -> Bucket:
        """The first ready rung that covers. Raises BucketMiss with the numbers when none does."""
        for bucket in self.of(phase):
            if bucket.covers(tokens, rows) and is_ready(bucket):
                return bucket
        largest = self.of(phase)[-1]
        raise BucketMiss(
            f"no ready {phase} rung covers {tokens} tokens in {rows} rows; the largest is {largest.name} "
            f"with {largest.tokens} tokens in {largest.rows} rows"
        )

    def diff(self, other: "BucketLadder") -> tuple[tuple[Bucket, ...], tuple[Bucket, ...]]:
        """Rungs to add and to drop when `other` replaces this ladder."""
        mine, theirs = set(self.rungs), set(other.rungs)
        return tuple(sorted(theirs - mine)), tuple(sorted(mine - theirs))

    def compile_order(self) -> tuple[Bucket, ...]:
        """One small rung of each phase first (the server is ready on them), then by what large batches need."""
        first = [self.decode[0], self._first_useful_prefill()]
        rest = [b for b in self._interleaved() if b not in first]
        return tuple(first + rest)

    def _first_useful_prefill(self) -> Bucket:
        """The smallest rung of at least 64 tokens: chunks of one page would make long prompts crawl."""
        return next((b for b in self.prefill if b.tokens >= 64), self.prefill[-1])

    def _interleaved(self) -> Iterable[Bucket]:
        """Both phases in turn, largest first: a missing small rung costs padding, a missing large one throughput."""
        queues = [list(reversed(self.decode)), list(reversed(self.prefill))]
        while any(queues):
            for queue in queues:
                if queue:
                    yield queue.pop(0)


def _exchange(parallel: ParallelConfig, tokens: int) -> ExchangeKind:
    """How the tokens of a rung of this size get to their experts."""
    if parallel.expert_parallel_size == 1:
        return ExchangeKind.LOCAL
    if parallel.exchange != "auto":
        return ExchangeKind(parallel.exchange)
    return ExchangeKind.GATHER if tokens <= parallel.gather_max_tokens else ExchangeKind.ALL_TO_ALL


def default_decode_rows(max_rows: int) -> tuple[int, ...]:
    """Powers of two with one size between them up to 16, three above: 1 2 3 4 6 8 12 16 20 24 28 32 40 ...

    Large batches cost most, so there the steps are finer (at most 20 % padding); a still finer ladder costs compile
    time for little. `max_rows` is always the last rung.
    """
    sizes, base = [1], 2
    while base < max_rows:
        parts = 2 if base < 16 else 4
        sizes += [base + base * i // parts for i in range(parts)]
        base *= 2
    return (*sorted({n for n in sizes if n < max_rows}), max_rows)


def default_prefill_tokens(largest: int, page_size: int) -> tuple[int, ...]:
    """The same steps, counted in whole pages."""
    pages = default_decode_rows(max(1, largest // page_size))
    return tuple(p * page_size for p in pages)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
