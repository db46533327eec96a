"""The router on Hopper: 64 tokens a block, all their scores in registers, one slice of neighbouring experts after another.

Mosaic has no argmax, sort or cumsum. The best expert is the lowest index that reaches the maximum; a group of experts is kept
if fewer than `num_kept_groups` groups beat it. Results leave as [k, tokens], for whole rows are stored, and the histogram
as one row a block, which XLA adds up: cheaper than atomics, and the same at every run.

Everything is computed as `reference.py` does, without approximate functions: another expert is another result.
"""

import functools
from collections.abc import Callable
from operator import add

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.interpret import InterpretParams
from pallas_kernels.router.reference import TINY
from pallas_kernels.router.spec import RouterChoice, RouterSpec

TOKENS = 64  # of a block: the rows of wgmma's layout
MAX_EXPERTS = 256  # scores of 64 x 256 take half of all registers
MAX_SLICE = 64
LEFT_OUT, TAKEN = -1e30, -2e30  # scores of experts that may not be chosen, or have been
NO_EXPERT = 1 << 30
LAYOUT = plgpu.Layout.WGMMA
ROW = LAYOUT.reduce(1)  # a value for each token


def unfit_for_mosaic(logits: Array | jax.ShapeDtypeStruct, spec: RouterSpec) -> str | None:
    """Why the kernel cannot take these operands, or None. Any number of tokens will do."""
    num_experts = logits.shape[1]
    if logits.dtype != jnp.float32:
        return f"takes logits of float32, got {logits.dtype}"
    if num_experts > MAX_EXPERTS:
        return f"takes at most {MAX_EXPERTS} experts, got {num_experts}"
    if slice_width(num_experts, spec) is None:
        return f"takes groups of a multiple of 8 experts, got {num_experts} in {spec.num_groups} groups"
    return None


def slice_width(num_experts: int, spec: RouterSpec) -> int | None:
    """Experts of one slice: a group where groups count, else the most up to 64 that divide; None where 8 do not."""
    if spec.is_grouped:
        width = num_experts // spec.num_groups
        return width if width % 8 == 0 else None
    return next((w for w in range(MAX_SLICE, 0, -8) if num_experts % w == 0), None)


def router_mosaic(
    logits: Float[Array, "T E"],
    is_real: Bool[Array, " T"],
    bias: Float[Array, " E"] | None,
    spec: RouterSpec,
    *,
    interpret: InterpretParams | None = None,
) -> RouterChoice:
    """The op. Raises NotImplementedError for operands that the kernel does not take."""
    reason = unfit_for_mosaic(logits, spec)
    if reason is not None:
        raise NotImplementedError(f"mosaic: {reason}")
    if logits.shape[0] == 0:
        empty = jnp.zeros((0, spec.top_k))
        return RouterChoice(empty, empty.astype(jnp.int32), jnp.zeros(logits.shape[1], jnp.int32))
    return _route(logits, is_real, bias, spec, interpret)


@functools.partial(jax.jit, static_argnums=(3, 4))  # one compilation for all layers
def _route(
    logits: Array, is_real: Array, bias: Array | None, spec: RouterSpec, interpret: InterpretParams | None
) -> RouterChoice:
    num_tokens, num_experts = logits.shape
    width = slice_width(num_experts, spec)
    assert width is not None
    num_blocks = -(-num_tokens // TOKENS)
    num_slices = num_experts // width
    rows_type = jax.ShapeDtypeStruct((spec.top_k, num_blocks * TOKENS), jnp.float32)

    def body(
        logits_ref,  # [T, E], T a multiple of 8, rows past the end are read as zeros
        is_real_ref,  # [blocks * 64] int32
        bias_ref,  # [E]
        weights_ref,  # [k, blocks * 64]
        ids_ref,  # [k, blocks * 64]
        counts_ref,  # [blocks, E]
    ):
        block = lax.axis_index("block")
        tokens = pl.ds(block * TOKENS, TOKENS)
        slices = [pl.ds(first, width) for first in range(0, num_experts, width)]

        @functools.partial(
            pl.run_scoped,
            scores_s=plgpu.SMEM((num_slices, TOKENS, width), jnp.float32),
            weights_s=plgpu.SMEM((spec.top_k, TOKENS), jnp.float32),
            ids_s=plgpu.SMEM((spec.top_k, TOKENS), jnp.int32),
            counts_s=plgpu.SMEM((num_experts,), jnp.int32),
            barrier=plgpu.Barrier(num_arrivals=num_slices),
        )
        def _(scores_s, weights_s, ids_s, counts_s, barrier):
            for i, part in enumerate(slices):
                plgpu.copy_gmem_to_smem(logits_ref.at[tokens, part], scores_s.at[i], barrier)
            plgpu.barrier_wait(barrier)
            _write_scores(scores_s, spec)
            choice = [_load(scores_s.at[i]) for i in range(num_slices)]
            if bias is not None:
                for i, part in enumerate(slices):
                    b = plgpu.load(bias_ref.at[part], layout=LAYOUT.reduce(0), optimized=False)
                    choice[i] = jnp.maximum(choice[i] + _across(b, choice[i]), LEFT_OUT)
            if spec.is_grouped:
                choice = _keep_groups(choice, spec)
            choice = _take_best(choice, weights_s, ids_s)
            real = plgpu.load(is_real_ref.at[tokens], layout=ROW, optimized=False)
            for part, c in zip(slices, choice, strict=True):
                counts_s[part] = jnp.where(c == TAKEN, _down(real, c), 0).sum(axis=0)
            _write_weights(weights_s, ids_s, scores_s, spec, has_bias=bias is not None)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(weights_s, weights_ref.at[:, tokens])
            plgpu.copy_smem_to_gmem(ids_s, ids_ref.at[:, tokens])
            plgpu.copy_smem_to_gmem(counts_s, counts_ref.at[block])
            plgpu.wait_smem_to_gmem(0)

    call: Callable[..., tuple[Array, Array, Array]] = plgpu.kernel(
        body,
        out_type=(
            rows_type,
            jax.ShapeDtypeStruct(rows_type.shape, jnp.int32),
            jax.ShapeDtypeStruct((num_blocks, num_experts), jnp.int32),
        ),
        grid=(num_blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name="router",
    )
    padded = jnp.pad(is_real.astype(jnp.int32), (0, num_blocks * TOKENS - num_tokens))
    no_bias = jnp.zeros(num_experts) if bias is None else bias.astype(jnp.float32)
    logits = jnp.pad(
        logits, ((0, -num_tokens % 8), (0, 0))
    )  # rows of a copy come in eights, or the compiler refuses
    weights, ids, counts = call(logits, padded, no_bias)
    return RouterChoice(weights.T[:num_tokens], ids.T[:num_tokens], jnp.sum(counts, axis=0, dtype=jnp.int32))


def _load(ref):
    return plgpu.load(ref, layout=LAYOUT, optimized=False)


def _load_row(ref):
    return plgpu.load(ref, layout=ROW, optimized=False)


def _row(value: float):
    return plgpu.layout_cast(jnp.full((TOKENS,), value, jnp.float32), ROW)


def _down(v, like):
    """A value for each token, at all its experts."""
    return lax.broadcast_in_dim(v, like.shape, [0])


def _across(v, like):
    """A value for each expert, at all tokens."""
    return lax.broadcast_in_dim(v, like.shape, [1])


def _column(like):
    return plgpu.broadcasted_iota(jnp.int32, like.shape, 1, layout=LAYOUT)


def _finite(z):
    """NaN and infinity would make indices of experts that do not exist, and so harm other tokens."""
    return jnp.minimum(jnp.maximum(jnp.where(z == z, z, LEFT_OUT), LEFT_OUT), -LEFT_OUT)  # noqa: PLR0124


def _write_scores(scores_s, spec: RouterSpec) -> None:
    """Logits [slices, 64, width] become scores, in place. Loops keep the code, and so the registers, few."""
    num_slices = scores_s.shape[0]

    def sigmoid(i, _):
        scores_s[i] = 1.0 / (1.0 + jnp.exp(-_finite(_load(scores_s.at[i]))))

    if spec.score == "sigmoid":
        lax.fori_loop(0, num_slices, sigmoid, None)
        return

    def highest(i, peak):
        return jnp.maximum(peak, _finite(_load(scores_s.at[i])).max(axis=1))

    peak = lax.fori_loop(0, num_slices, highest, _row(LEFT_OUT))

    def grow(i, total):
        z = _finite(_load(scores_s.at[i]))
        grown = jnp.exp(z - _down(peak, z))
        scores_s[i] = grown
        return total + grown.sum(axis=1)

    total = lax.fori_loop(0, num_slices, grow, _row(0.0))

    def share(i, _):
        grown = _load(scores_s.at[i])
        scores_s[i] = grown / _down(total, grown)

    lax.fori_loop(0, num_slices, share, None)


def _keep_groups(choice: list, spec: RouterSpec) -> list:
    """Slices are groups: those beaten by too many others are left out. Ties go to the lower group, as in top_k."""
    score = []
    for c in choice:
        best = c.max(axis=1)
        if spec.num_group_best == 2:
            at = jnp.where(c == _down(best, c), _column(c), NO_EXPERT).min(axis=1)
            best = best + jnp.where(_column(c) == _down(at, c), TAKEN, c).max(axis=1)
        score.append(best)
    kept = []
    for g, c in enumerate(choice):
        beaten_by = functools.reduce(
            add,
            [
                ((other > score[g]) if o > g else (other >= score[g])).astype(jnp.int32)
                for o, other in enumerate(score)
                if o != g
            ],
        )
        kept.append(jnp.where(_down(beaten_by, c) < spec.num_kept_groups, c, LEFT_OUT))
    return kept


def _take_best(choice: list, best_s, ids_s) -> list:
    """Writes each token's best scores and experts, [k, 64], in order; returns the slices with those marked as TAKEN."""
    width = choice[0].shape[1]

    def take(j, choice):
        best = functools.reduce(jnp.maximum, [c.max(axis=1) for c in choice])
        places = [
            jnp.where(c == _down(best, c), _column(c), NO_EXPERT).min(axis=1) + i * width
            for i, c in enumerate(choice)
        ]
        at = functools.reduce(jnp.minimum, places)
        best_s[j], ids_s[j] = best, at
        return tuple(
            jnp.where(_column(c) == _down(at - i * width, c), TAKEN, c) for i, c in enumerate(choice)
        )

    return list(lax.fori_loop(0, ids_s.shape[0], take, tuple(choice)))


def _write_weights(weights_s, ids_s, scores_s, spec: RouterSpec, *, has_bias: bool) -> None:
    """What was best becomes weights, in place. With a bias it is not the score, which is looked up again."""
    num_slices, _, width = scores_s.shape

    def score_of(at):
        """One expert's score for each token: summed over slices, for registers cannot be indexed."""

        def pick(i, picked):
            s = _load(scores_s.at[i])
            return picked + jnp.where(_column(s) == _down(at - i * width, s), s, 0.0)

        zeros = plgpu.layout_cast(jnp.zeros((TOKENS, width), jnp.float32), LAYOUT)
        return lax.fori_loop(0, num_slices, pick, zeros).sum(axis=1)

    def unbiased(j, total):
        weight = _load_row(weights_s.at[j])
        if has_bias:
            weight = score_of(_load_row(ids_s.at[j]))
            weights_s[j] = weight
        return total + weight

    total = 1.0
    if has_bias or spec.renormalise:
        sum_of_chosen = lax.fori_loop(0, spec.top_k, unbiased, _row(0.0))
        total = sum_of_chosen + TINY if spec.renormalise else total

    def scaled(j, _):
        weights_s[j] = _load_row(weights_s.at[j]) / total * spec.scale

    if spec.renormalise or spec.scale != 1.0:
        lax.fori_loop(0, spec.top_k, scaled, None)
