"""Latent attention's named cases for the check on a chip."""

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.small_case import SmallCase
from pallas_kernels.mla_attention.cases import CASES, make_inputs
from pallas_kernels.mla_attention.kernel import mla_attention_mosaic
from pallas_kernels.mla_attention.reference import mla_attention_reference


def small_cases(seed: int) -> Iterator[SmallCase]:
    for case in CASES:
        given = make_inputs(case, seed)
        options = {name: given[name] for name in ("num_latent", "scale")}
        yield SmallCase(
            f"mla_attention/{case.name}",
            tuple(given[name] for name in ("q", "pages", "page_table", "kv_len")),
            lambda interpret, options=options: partial(mla_attention_mosaic, interpret=interpret, **options),
            partial(mla_attention_reference, **options),
            is_short=case.name == "one row of one key",
        )
