"""The router's named cases for the check on a chip. Which experts, exactly; their weights, within the tolerance."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.small_case import SmallCase
from pallas_kernels.router.cases import CASES, make_inputs
from pallas_kernels.router.kernel import router_mosaic
from pallas_kernels.router.reference import router_reference


def small_cases(seed: int) -> Iterator[SmallCase]:
    for case in CASES:
        logits, is_real, bias = make_inputs(case, seed)

        def kernel(interpret: Any, case: Any = case) -> Callable[..., jax.Array]:
            return partial(_one_array, partial(router_mosaic, spec=case.spec, interpret=interpret))

        yield SmallCase(
            f"router/{case.name}",
            (logits, is_real, bias),
            kernel,
            partial(_one_array, partial(router_reference, spec=case.spec)),
            is_short=case.name == "one token",
        )


def _one_array(
    route: Callable[..., Any], logits: jax.Array, is_real: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """Ids as rows of zeros and a one, so that a wrong expert cannot hide in a tolerance; and the counts."""
    choice = route(logits, is_real, bias)
    ids = jax.nn.one_hot(choice.expert_ids, logits.shape[1], dtype=jnp.float32)
    counts = jax.nn.one_hot(choice.counts, logits.shape[0] * choice.weights.shape[1] + 1, dtype=jnp.float32)
    return jnp.concatenate([choice.weights.reshape(-1), ids.reshape(-1), counts.reshape(-1)])
