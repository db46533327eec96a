"""Every named case of every op, tiny and extreme: fresh random inputs, a call of the kernel, a float32 reference."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import mla_cases, quantized_cases, router_cases
from benchmarks.gpu.small_case import SmallCase
from pallas_kernels.expert_mlp.cases import CASES as MLP_CASES
from pallas_kernels.expert_mlp.cases import Case as MlpCase
from pallas_kernels.expert_mlp.mosaic import expert_mlp_mosaic
from pallas_kernels.expert_mlp.reference import expert_mlp_reference
from pallas_kernels.grouped_matmul.cases import CASES as PRODUCT_CASES
from pallas_kernels.grouped_matmul.cases import Case as ProductCase
from pallas_kernels.grouped_matmul.op import grouped_matmul_mosaic
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.paged_attention import cases as decode
from pallas_kernels.paged_attention.kernel import paged_attention_mosaic
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.prefill_attention import cases as prefill
from pallas_kernels.prefill_attention.kernel import prefill_attention_mosaic
from pallas_kernels.prefill_attention.reference import prefill_attention_reference, row_of_tokens

MLP_WIDTHS = (128, 64)  # in place of the cases' own, which are too narrow for the kernel


def small_cases(seed: int) -> Iterator[SmallCase]:
    yield from (_product(case, seed) for case in PRODUCT_CASES)
    yield from (_mlp(case, seed) for case in MLP_CASES if case.dtype == "bfloat16")
    yield from (_decode(case, seed) for case in decode.CASES)
    yield from (_prefill(case, seed) for case in prefill.CASES)
    yield from router_cases.small_cases(seed)
    yield from quantized_cases.small_cases(seed)
    yield from mla_cases.small_cases(seed)


def _product(case: ProductCase, seed: int) -> SmallCase:
    rng = np.random.default_rng(seed)
    columns = case.outputs * (1 if case.gate is None else 2)
    x = rng.standard_normal((case.num_rows, case.k), np.float32)
    w = rng.standard_normal((len(case.group_sizes), columns, case.k), np.float32) * 2 * case.k**-0.5
    x[sum(case.group_sizes) :] = np.nan
    w[np.asarray(case.group_sizes) == 0] = np.nan
    args = (
        jnp.asarray(x, jnp.bfloat16),
        jnp.asarray(w, jnp.bfloat16),
        jnp.array(case.group_sizes, jnp.int32),
    )
    return SmallCase(
        f"grouped_matmul/{case.name}",
        args,
        lambda interpret: partial(grouped_matmul_mosaic, gate=case.gate, tile=case.tile, interpret=interpret),
        partial(grouped_matmul_reference, gate=case.gate),
        is_short=case.name in ("empty experts and padding", "empty experts and padding, swapped"),
    )


def _mlp(case: MlpCase, seed: int) -> SmallCase:
    rng = np.random.default_rng(seed)
    (d, f), e = MLP_WIDTHS, case.num_experts
    x = rng.standard_normal((case.num_rows, d), np.float32)
    w_gate_up = rng.standard_normal((e, 2 * f, d), np.float32) * 2 * d**-0.5
    w_down = rng.standard_normal((e, d, f), np.float32) * 2 * f**-0.5
    x[sum(case.group_sizes) :] = np.nan
    for w in (w_gate_up, w_down):
        w[np.asarray(case.group_sizes) == 0] = np.nan
    arrays = (jnp.asarray(a, jnp.bfloat16) for a in (x, w_gate_up, w_down))
    return SmallCase(
        f"expert_mlp/{case.name}",
        (*arrays, jnp.array(case.group_sizes, jnp.int32)),
        lambda interpret: partial(expert_mlp_mosaic, activation="silu", interpret=interpret),
        partial(expert_mlp_reference, activation="silu"),
        is_short=case.name == "padding",
    )


def _decode(case: decode.Case, seed: int) -> SmallCase:
    given = decode.make_inputs(case, seed)
    options = {name: given[name] for name in ("sinks", "window", "soft_cap")}
    return SmallCase(
        f"paged_attention/{case.name}",
        tuple(given[name] for name in ("q", "pages", "page_table", "kv_len")),
        lambda interpret: partial(paged_attention_mosaic, interpret=interpret, **options),
        partial(paged_attention_reference, **options),
        is_short=case.name == "one row of one key",
    )


def _prefill(case: prefill.Case, seed: int) -> SmallCase:
    given = prefill.make_inputs(case, seed)
    options = {name: given[name] for name in ("sinks", "window", "soft_cap")}
    names = ("q", "pages", "page_table", "row_start", "row_len", "context_len")

    def real_places(function: Callable[..., Any], *args: Any, **options: Any) -> jax.Array:
        """Places without a token mean nothing."""
        out = function(*args, **options)
        is_real = row_of_tokens(args[3], args[4], out.shape[0])[2]
        return jnp.where(is_real[:, None, None], out, 0)

    return SmallCase(
        f"prefill_attention/{case.name}",
        tuple(given[name] for name in names),
        lambda interpret: partial(real_places, prefill_attention_mosaic, interpret=interpret, **options),
        partial(real_places, prefill_attention_reference, **options),
        is_short=case.name == "one token",
    )
