"""The named cases that test, ahead-of-time build and benchmark share: tiny ones, the extremes, and shapes of real models."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.aot_cases import AotCase
from pallas_kernels.router.kernel import router_mosaic
from pallas_kernels.router.spec import RouterSpec

SPILLED_WITH_GROUPS = 32  # bytes: the scores of 256 experts alone are 128 of a thread's 255 registers


@dataclass(frozen=True)
class Case:
    """One call: tokens, the last `num_padding` of them padding. ties: logits are small integers, so most are equal."""

    name: str
    spec: RouterSpec
    num_tokens: int = 5
    num_experts: int = 16
    num_padding: int = 0
    has_bias: bool = False
    has_ties: bool = False


PLAIN = RouterSpec(top_k=2)
GROUPED = RouterSpec(3, "sigmoid", renormalise=True, num_groups=4, num_kept_groups=2, scale=2.5)
DEEPSEEK_V2 = RouterSpec(6, num_groups=8, num_kept_groups=3, num_group_best=1, scale=16.0)
DEEPSEEK_V3 = RouterSpec(8, "sigmoid", renormalise=True, num_groups=8, num_kept_groups=4, scale=2.5)

CASES: tuple[Case, ...] = (
    Case("one token", PLAIN, num_tokens=1),
    Case("a block and a token", RouterSpec(2, renormalise=True), num_tokens=65, num_padding=2),
    Case("ties", RouterSpec(4, renormalise=True), num_tokens=20, has_ties=True),
    Case("all experts", RouterSpec(8), num_experts=8),
    Case("only padding", PLAIN, num_padding=5),
    Case("sigmoid", RouterSpec(3, "sigmoid", scale=0.5)),
    Case("bias", RouterSpec(3, "sigmoid", renormalise=True), has_bias=True),
    Case("softmax and bias", RouterSpec(3), has_bias=True),
    Case("groups", GROUPED, num_experts=32, num_tokens=20, has_bias=True),
    Case("groups and ties", GROUPED, num_experts=32, num_tokens=40, has_bias=True, has_ties=True),
    Case("groups of one best, without a bias", DEEPSEEK_V2, num_experts=64, num_tokens=9),
    Case("more than a slice", RouterSpec(4, renormalise=True), num_experts=128, num_tokens=9),
)


def make_inputs(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(logits, is_real, bias), the first three operands of every implementation."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((case.num_tokens, case.num_experts)).astype(np.float32)
    bias = rng.standard_normal(case.num_experts).astype(np.float32) * 0.3
    if case.has_ties:
        logits, bias = np.round(logits), np.round(bias)
    is_real = np.arange(case.num_tokens) < case.num_tokens - case.num_padding
    return jnp.asarray(logits), jnp.asarray(is_real), jnp.asarray(bias) if case.has_bias else None


def aot_case(model: str, num_tokens: int, num_experts: int, spec: RouterSpec, *, has_bias: bool) -> AotCase:
    """The kernel alone at a model's shape."""

    def function(logits, is_real, bias=None):
        return router_mosaic(logits, is_real, bias, spec)

    args = (
        jax.ShapeDtypeStruct((num_tokens, num_experts), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.bool_),
    )
    args += (jax.ShapeDtypeStruct((num_experts,), jnp.float32),) if has_bias else ()
    return AotCase(
        f"router/{model}/tokens={num_tokens}",
        function,
        args,
        needs_wgmma=False,
        max_spill_bytes=SPILLED_WITH_GROUPS if num_experts == 256 else 0,
    )


AOT_CASES: tuple[AotCase, ...] = (
    aot_case("qwen3-30b-a3b", 64, 128, RouterSpec(8, renormalise=True), has_bias=False),
    aot_case("qwen3-30b-a3b", 4096, 128, RouterSpec(8, renormalise=True), has_bias=False),
    aot_case("mixtral-8x7b", 64, 8, RouterSpec(2, renormalise=True), has_bias=False),
    aot_case("deepseek-v3", 64, 256, DEEPSEEK_V3, has_bias=True),
)
