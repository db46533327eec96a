"""The gated MLP of routed experts over rows sorted by expert: checks, packing of weights, choice of backend.

Knows nothing of routing: who sorts the rows and who combines the results is the caller's business.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import BackendChoice, choose_backend
from pallas_kernels.expert_mlp.mosaic import expert_mlp_mosaic, unfit_for_expert_mlp
from pallas_kernels.expert_mlp.native import expert_mlp_native
from pallas_kernels.expert_mlp.reference import ACTIVATIONS, expert_mlp_reference
from pallas_kernels.expert_mlp.xla import expert_mlp_xla
from pallas_kernels.native.library import unfit_for_native

IMPLEMENTATIONS = {
    "mosaic": expert_mlp_mosaic,
    "native": expert_mlp_native,
    "xla": expert_mlp_xla,
    "reference": expert_mlp_reference,
}


def expert_mlp(
    x_sorted: Float[Array, "N D"],
    w_gate_up: Float[Array, "E F2 D"],
    w_down: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    *,
    activation: str = "silu",
    backend: str | None = None,
) -> Float[Array, "N D"]:
    """Row n of group e becomes `down[e] @ (act(gate[e] @ x) * (up[e] @ x))`, accumulated in float32.

    x_sorted: rows sorted by expert; group e holds group_sizes[e] rows, in order.
    w_gate_up, w_down: as `pack_expert_weights` lays them out, gate over up in axis 1. Both keep the contraction last:
        CPU code reads it as lanes, and a Hopper kernel takes it as a K-major operand.
    group_sizes: int32, sum <= N. Rows past the sum are padding: no expert is read for them, and they return as
        zeros whatever they held.
    activation: one of "silu", "gelu", "gelu_tanh".
    backend: a name of `IMPLEMENTATIONS`; by default the best that runs here.
    """
    _check(x_sorted, w_gate_up, w_down, group_sizes, activation)
    name = choose_expert_mlp(x_sorted, w_gate_up, w_down, activation, backend).name
    with jax.named_scope("expert_mlp"):
        return IMPLEMENTATIONS[name](x_sorted, w_gate_up, w_down, group_sizes, activation)


def choose_expert_mlp(
    x: Array | jax.ShapeDtypeStruct,
    w_gate_up: Array | jax.ShapeDtypeStruct,
    w_down: Array | jax.ShapeDtypeStruct,
    activation: str,
    backend: str | None = None,
) -> BackendChoice:
    """Which implementation takes these operands here, and why. Raises as `choose_backend` does."""
    unfit = dict(unfit_for_native(x, w_gate_up, w_down))
    not_mosaic = unfit_for_expert_mlp(x, w_gate_up, w_down, activation)
    if not_mosaic is not None:
        unfit["mosaic"] = not_mosaic
    return choose_backend(tuple(IMPLEMENTATIONS), backend, unfit=unfit)


def pack_expert_weights(
    gate: Float[np.ndarray, "E F D"], up: Float[np.ndarray, "E F D"], down: Float[np.ndarray, "E D F"]
) -> tuple[Float[np.ndarray, "E F2 D"], Float[np.ndarray, "E D F"]]:
    """Hugging Face weights (each `[out, in]`) to the layout of the op: (w_gate_up [E, 2F, D], w_down [E, D, F]).

    Both stay `[out, in]`, so that a loader may write `gate` to rows [0, F) and `up` to rows [F, 2F) in place.
    """
    return np.concatenate([gate, up], axis=1), down


def _check(x: Array, w_gate_up: Array, w_down: Array, group_sizes: Array, activation: str) -> None:
    num_experts, two_f, d = w_gate_up.shape
    if x.ndim != 2 or x.shape[1] != d:
        raise ValueError(
            f"x_sorted has shape {x.shape}, w_gate_up {w_gate_up.shape}: the last axes must be equal"
        )
    if w_down.shape != (num_experts, d, two_f // 2):
        raise ValueError(f"w_down has shape {w_down.shape}, expected {(num_experts, d, two_f // 2)}")
    if group_sizes.shape != (num_experts,) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes is {group_sizes.dtype}{group_sizes.shape}, expected int32({num_experts},)"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {tuple(ACTIVATIONS)}")
