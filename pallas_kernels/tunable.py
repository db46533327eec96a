"""The shapes that tuning and the check on a chip know, by op."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pallas_kernels.grouped_matmul import workload as grouped_matmul
from pallas_kernels.grouped_matmul.cases import PRODUCTS, Product
from pallas_kernels.paged_attention import workload as paged_attention
from pallas_kernels.paged_attention.cases import ModelShape
from pallas_kernels.prefill_attention import workload as prefill_attention
from pallas_kernels.workload import Workload


@dataclass(frozen=True)
class Tunable:
    """shapes: of real models. tiny: for the interpreter. make: a shape and a seed to the arrays; allocates.

    has_table: whether the op reads its tiles from a table; the others are checked and timed only.
    """

    shapes: tuple[Any, ...]
    tiny: tuple[Any, ...]
    make: Callable[[Any, int], Workload]
    has_table: bool = True


OPS: Mapping[str, Tunable] = {
    "grouped_matmul": Tunable(
        PRODUCTS,
        (Product("tiny", 24, 4, 128, 64, "silu"), Product("tiny", 140, 2, 128, 64, None)),
        grouped_matmul.make_workload,
    ),
    "paged_attention": Tunable(
        paged_attention.DECODES,
        (paged_attention.Decode(ModelShape("tiny", 4, 2, 64), 2, 128),),
        paged_attention.make_workload,
    ),
    "prefill_attention": Tunable(
        prefill_attention.PREFILLS,
        (prefill_attention.Prefill(ModelShape("tiny", 2, 1, 64), 128),),
        prefill_attention.make_workload,
        has_table=False,
    ),
}


def shapes_in_turn(*, is_tiny: bool) -> Iterator[tuple[Tunable, Any]]:
    """The first shape of every op, then the second: where time runs out, no op has been left out."""
    columns = ([(op, shape) for shape in (op.tiny if is_tiny else op.shapes)] for op in OPS.values())
    for row in zip_longest(*columns):
        yield from (pair for pair in row if pair is not None)
