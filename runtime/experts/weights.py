"""MoEParams: the weights of one mixture-of-experts layer."""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEParams:
    """router [E, D] float32; w_gate_up [E, 2 F, D] and w_down [E, D, F] in the layout of the expert_mlp op.

    router_bias [E] float32, or None where nothing corrects the choice of experts.
    """

    router: Any
    w_gate_up: Any
    w_down: Any
    router_bias: Any = None
