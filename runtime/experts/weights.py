"""MoEParams: the weights of one mixture-of-experts layer."""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEParams:
    """router [E, D] float32; w_gate_up [P, 2 F, D] and w_down [P, D, F] in the layout of the expert_mlp op.

    P physical slots, each with the weights of some expert; without expert parallelism slot e holds expert e.
    copies: int32 [E, R] or None. The n-th row of a step that wants expert e goes to slot copies[e, n % R]: a copy that
    shall take 3 of 8 rows stands in three eighths of the places.
    router_bias [E] float32, or None where nothing corrects the choice of experts. On several devices never None: it is the
    checkpoint's, or zeros, and what `expert_lean_between` adds.
    routing_table: None, or the RoutingTable that comes before the router; never part of a checkpoint.
    """

    router: Any
    w_gate_up: Any
    w_down: Any
    router_bias: Any = None
    copies: Any = None
    routing_table: Any = None
