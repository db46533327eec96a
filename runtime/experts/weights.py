"""MoEParams: the weights of one mixture-of-experts layer; ExpertStore: all its experts where only some are resident."""

from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertStore:
    """w_gate_up [E, 2 F, D] and w_down [E, D, F] of every expert, in host memory where the backend tells it apart.

    slot_of_expert: int32 [E], the physical slot that holds the expert's copy; -1: it is asleep.
    num_staged: experts of this layer that the layer before may fetch ahead; 0: none.
    """

    w_gate_up: Any
    w_down: Any
    slot_of_expert: Any
    num_staged: int = field(metadata={"static": True}, default=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEParams:
    """router [E, D] float32; w_gate_up [P, 2 F, D] and w_down [P, D, F] in the layout of the expert_mlp op.

    P physical slots, each with the weights of some expert; on one device slot e holds expert e, but for a store.
    copies: int32 [E, G] or None, where the copies of each expert lie on G devices: see `copies.copies_table`.
    router_bias [E] float32, or None where nothing corrects the choice of experts. On several devices never None: it is the
    checkpoint's, or zeros, and what `expert_lean_between` adds.
    routing_table: None, or the RoutingTable that comes before the router; never part of a checkpoint.
    store: None, or the ExpertStore of a layer that has fewer slots than experts.
    """

    router: Any
    w_gate_up: Any
    w_down: Any
    router_bias: Any = None
    copies: Any = None
    routing_table: Any = None
    store: Any = None
