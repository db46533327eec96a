"""The shapes that tuning knows, by op: a line here makes an op tunable."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pallas_kernels.grouped_matmul import workload as grouped_matmul
from pallas_kernels.grouped_matmul.cases import PRODUCTS, Product
from pallas_kernels.paged_attention import workload as paged_attention
from pallas_kernels.paged_attention.cases import ModelShape
from pallas_kernels.workload import Workload


@dataclass(frozen=True)
class Tunable:
    """shapes: of real models. tiny: for the interpreter. make: a shape and a seed to the arrays; allocates."""

    shapes: tuple[Any, ...]
    tiny: tuple[Any, ...]
    make: Callable[[Any, int], Workload]


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
}
