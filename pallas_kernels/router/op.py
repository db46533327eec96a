"""The router: checks and the choice of backend. The logits are the caller's product, in float32."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.backend import BackendChoice, choose_backend
from pallas_kernels.router.kernel import router_mosaic, unfit_for_mosaic
from pallas_kernels.router.reference import router_reference
from pallas_kernels.router.spec import RouterChoice, RouterSpec
from pallas_kernels.router.xla import router_xla

IMPLEMENTATIONS = {"mosaic": router_mosaic, "xla": router_xla, "reference": router_reference}


def router(
    logits: Float[Array, "T E"],
    is_real: Bool[Array, " T"],
    spec: RouterSpec,
    *,
    bias: Float[Array, " E"] | None = None,
    backend: str | None = None,
) -> RouterChoice:
    """Each token's `top_k` experts and their weights, and how many real tokens each expert got.

    score = softmax or sigmoid of the logits; experts are chosen by score + bias, weighed by score alone.
    is_real: tokens that count; the others are routed like any and not counted.
    bias: a correction for each expert that steers the choice only (DeepSeek-V3); None for none.
    backend: a name of `IMPLEMENTATIONS`; by default the best that runs here.
    Raises ValueError for shapes or a spec that do not fit each other.
    """
    _check(logits, is_real, bias)
    spec.check(logits.shape[1])
    name = choose_router(logits, spec, backend).name
    with jax.named_scope("router"):
        return IMPLEMENTATIONS[name](logits, is_real, bias, spec)


def choose_router(
    logits: Array | jax.ShapeDtypeStruct, spec: RouterSpec, backend: str | None = None
) -> BackendChoice:
    """Which implementation takes these operands here, and why. Raises as `choose_backend` does."""
    reason = unfit_for_mosaic(logits, spec)
    unfit: Mapping[str, str] = {} if reason is None else {"mosaic": reason}
    return choose_backend(tuple(IMPLEMENTATIONS), backend, unfit=unfit)


def _check(logits: Array, is_real: Array, bias: Array | None) -> None:
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits is {logits.dtype}{logits.shape}, expected float32[tokens, experts]")
    if is_real.shape != logits.shape[:1] or is_real.dtype != jnp.bool_:
        raise ValueError(f"is_real is {is_real.dtype}{is_real.shape}, expected bool{logits.shape[:1]}")
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(f"bias has shape {bias.shape}, expected {logits.shape[1:]}, one for each expert")
