"""Bucket: one compiled shape. Imports no JAX."""

from dataclasses import dataclass, replace

from runtime.experts.exchange_kind import ExchangeKind
from runtime.schedule.plan import Phase


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A step shape that is compiled ahead of time.

    `tokens` is the number of positions computed: the flat token count in prefill, the rows in decode. `rows` is the
    number of page-table rows. The context length is no part of the shape: attention loops over the pages in use.
    Both count over all shards of an engine; each computes an equal part. `num_halves` 2: a step is computed as two
    micro-batches, so that the exchange of one can run beside the compute of the other.
    """

    phase: Phase
    tokens: int
    rows: int
    exchange: ExchangeKind = ExchangeKind.LOCAL
    num_halves: int = 1

    @property
    def name(self) -> str:
        """Names the whole shape: two buckets with one name are the same executable."""
        rows = f"x{self.rows}" if self.phase is Phase.PREFILL else ""
        exchange = "" if self.exchange is ExchangeKind.LOCAL else f"-{self.exchange.value}"
        halves = "-halves" if self.num_halves == 2 else ""
        return f"{self.phase.value}-{self.tokens}{rows}{exchange}{halves}"

    def in_halves(self, num_shards: int, page_size: int) -> "Bucket | None":
        """The same step as two micro-batches; None where a shard's part cannot be cut in two."""
        unit = 2 * num_shards * (page_size if self.phase is Phase.PREFILL else 1)
        return replace(self, num_halves=2) if self.tokens % unit == 0 else None

    def share(self, num_shards: int) -> "Bucket":
        """What one shard computes."""
        return replace(self, tokens=self.tokens // num_shards, rows=self.rows // num_shards)

    def covers(self, tokens: int, rows: int) -> bool:
        return tokens <= self.tokens and rows <= self.rows

    def waste(self, real_tokens: int) -> float:
        """Share of the computed positions that are padding."""
        return (self.tokens - real_tokens) / self.tokens


def prefill_bucket(
    tokens: int, page_size: int, max_rows: int, exchange: ExchangeKind = ExchangeKind.LOCAL
) -> Bucket:
    """A prefill shape; a chunk fills at least one page, so there cannot be more rows than pages."""
    return Bucket(Phase.PREFILL, tokens, max(1, min(max_rows, tokens // page_size)), exchange)


def decode_bucket(rows: int, exchange: ExchangeKind = ExchangeKind.LOCAL) -> Bucket:
    return Bucket(Phase.DECODE, rows, rows, exchange)
