"""A rebalance plan: moves in order, what they cost and what they are expected to save. Also the dry run of an operator.

A move is an investment: it is planned only if the rows it takes off the heaviest device, over the steps that the plan is
expected to hold, are worth more time than the copy takes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from runtime.experts.balancer import SlotShape, balance, checked_loads
from runtime.experts.improvement import Improvement, improve
from runtime.experts.move_order import transfers
from runtime.experts.moves import plan_moves
from runtime.experts.placement import ExpertPlacement, Move
from runtime.experts.shares import device_loads, imbalance, slot_shares


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What a plan reckons with.

    row_s: seconds that one more row on the heaviest device makes a layer longer. move_s: seconds that one transfer
    (a move, or two of a layer) adds to the steps it is made in: what a move costs at most. plan_life_steps: how long a
    placement is expected to stay right.
    balance_weight: expert_balance_weight, in [0, 0.5]. confidence: standard errors of the load estimate that count as
    load when a new placement hands out copies. max_moves: of one plan. max_rounds: changes a layer in one plan.
    num_nodes, num_groups: more than one keeps groups of experts on their nodes.
    """

    row_s: float = 1e-6
    move_s: float = 1e-3
    plan_life_steps: int = 1000
    balance_weight: float = 0.0
    confidence: float = 2.0
    max_moves: int = 64
    max_rounds: int = 2
    num_nodes: int = 1
    num_groups: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (
            ("row_s", 1e-12, 1.0),
            ("move_s", 0.0, 60.0),
            ("plan_life_steps", 1, 10**9),
            ("balance_weight", 0.0, 0.5),
            ("confidence", 0.0, 10.0),
            ("max_moves", 1, 10**6),
            ("max_rounds", 1, 1000),
            ("num_nodes", 1, 4096),
            ("num_groups", 1, 65536),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise ValueError(f"{name} must be in [{low}, {high}], not {value}")

    @property
    def min_saving(self) -> float:
        """Rows a step that one move must take off the heaviest device of its layer."""
        return self.move_s / (self.row_s * self.plan_life_steps)

    @property
    def nodes_apart(self) -> int:
        """Nodes that experts may not leave: all or, without groups that divide over them, one."""
        return self.num_nodes if self.num_nodes > 1 and self.num_groups % self.num_nodes == 0 else 1


@dataclass(frozen=True, eq=False)
class RebalancePlan:
    """moves: in an order that can be served through. imbalance_before, imbalance_after: float64 [L], of the loads the
    plan was made for. saved_rows: off the heaviest devices, summed over layers, a step. cost_s: all transfers, if no
    step's limit parts two moves of a layer; saving_s: over the plan's life."""

    moves: tuple[Move, ...]
    imbalance_before: np.ndarray
    imbalance_after: np.ndarray
    saved_rows: float
    cost_s: float
    saving_s: float


def plan_improvement(
    placement: ExpertPlacement,
    loads: np.ndarray,
    config: PlanConfig,
    pinned_layers: frozenset[int] = frozenset(),
) -> RebalancePlan:
    """A few moves from what serves now, for loads [L, E] in rows a step; the layers that gain most a move come first."""
    making = PlanImprovement(placement, loads, config, pinned_layers)
    while making.num_left:
        making.advance(placement.num_layers)
    return making.finish()


class PlanImprovement:
    """`plan_improvement`, made some layers at a time: layers meet only in the choice of those whose moves pay best.

    num_left: layers that are not looked at yet.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        loads: np.ndarray,
        config: PlanConfig,
        pinned_layers: frozenset[int] = frozenset(),
    ) -> None:
        self.placement, self.config = placement, config
        self.num_left = placement.num_layers
        self._loads = checked_loads(loads, placement.num_experts, placement.num_layers).copy()
        self._min_saving = np.full(placement.num_layers, config.min_saving)
        self._min_saving[_checked(pinned_layers, placement)] = np.inf
        self._found: Improvement | None = None  # of layers whose moves are not in order yet
        self._moves: dict[int, list[Move]] = {}  # of each layer that has some
        self._saved = np.zeros(placement.num_layers)
        shape = (placement.num_layers, placement.num_devices)
        self._was, self._becomes = np.zeros(shape), np.zeros(shape)

    def advance(self, num_layers: int) -> None:
        """Half of the work for the next so many layers, or those that are left: first what to change, then by which moves."""
        if self._found is not None:
            self._order_moves(self._found)
            self._found = None
        elif self.num_left:
            first = self.placement.num_layers - self.num_left
            layers, config = slice(first, first + num_layers), self.config
            self._found = improve(
                _like(self.placement, self.placement.slot_experts[layers]),
                self._loads[layers],
                min_saving=self._min_saving[layers],
                balance_weight=config.balance_weight,
                max_rounds=config.max_rounds,
                num_nodes=config.nodes_apart,
            )

    def _order_moves(self, found: Improvement) -> None:
        first, num_layers = self.placement.num_layers - self.num_left, found.placement.num_layers
        layers = slice(first, first + num_layers)
        before, loads = _like(self.placement, self.placement.slot_experts[layers]), self._loads[layers]
        moves = plan_moves(before, found.placement, self.config.nodes_apart)
        for move in moves:
            self._moves.setdefault(first + move.layer, []).append(replace(move, layer=first + move.layer))
        self._saved[layers] = found.saved
        both = np.concatenate(
            [before.slot_experts, _moved(before, moves)]
        )  # in one call: short arrays cost by the call
        by_device = _on_devices(_like(before, both), np.tile(loads, (2, 1)), self.config)
        self._was[layers], self._becomes[layers] = np.split(by_device, 2)
        self.num_left -= num_layers

    def finish(self) -> RebalancePlan:
        """Whole layers by falling saving a move, up to max_moves; the first one may be cut short. ValueError while layers
        are left."""
        if self.num_left:
            raise ValueError(f"{self.num_left} layers are not planned yet")
        kept, by_layer, becomes = list[Move](), self._moves, self._was.copy()
        for layer in sorted(by_layer, key=lambda layer: -self._saved[layer] / len(by_layer[layer])):
            if not kept or len(kept) + len(by_layer[layer]) <= self.config.max_moves:
                kept += by_layer[layer]
                becomes[layer] = self._becomes[layer]
        if len(kept) > self.config.max_moves:  # all are of the first layer
            del kept[self.config.max_moves :]
            becomes[kept[0].layer] = self._cut_short(kept)
        return _priced(tuple(kept), self._was, becomes, self.config)

    def _cut_short(self, moves: list[Move]) -> np.ndarray:
        """[D]: loads of the devices after some moves of one layer."""
        layer = slice(moves[0].layer, moves[0].layer + 1)
        before = _like(self.placement, self.placement.slot_experts[layer])
        after = _like(before, _moved(before, [replace(move, layer=0) for move in moves]))
        return _on_devices(after, self._loads[layer], self.config)[0]


def plan_anew(
    placement: ExpertPlacement,
    loads: np.ndarray,
    config: PlanConfig,
    pinned_layers: frozenset[int] = frozenset(),
    uncertainty: np.ndarray | None = None,
) -> RebalancePlan:
    """All moves to a placement made from nothing but the loads, however many: an operator's full rebalance.

    Layers whose moves cost more than they save keep what they have.
    """
    making = PlanAnew(placement, loads, config, uncertainty)
    making.advance(placement.num_layers)
    return making.finish(pinned_layers)


class PlanAnew:
    """`plan_anew`, made some layers at a time: layers have nothing to do with each other.

    num_left: layers that are not planned yet.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        loads: np.ndarray,
        config: PlanConfig,
        uncertainty: np.ndarray | None = None,
    ) -> None:
        self.placement, self.config = placement, config
        self.num_left = placement.num_layers
        self._loads = checked_loads(loads, placement.num_experts, placement.num_layers).copy()
        self._widening = (
            None if uncertainty is None or config.confidence == 0 else config.confidence * uncertainty
        )
        self._moves: list[Move] = []
        self._by_device: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # of the layers planned: [l, D] before and after

    def advance(self, num_layers: int) -> None:
        """Plan the next so many layers, or those that are left."""
        first = self.placement.num_layers - self.num_left
        layers = slice(first, first + num_layers)
        before, loads, config = self.placement, self._loads[layers], self.config
        if not len(loads):
            return
        shape = SlotShape(
            before.num_experts,
            before.num_devices,
            before.slots_per_device,
            config.num_groups,
            config.num_nodes,
        )
        before = _like(before, before.slot_experts[layers])
        widening = None if self._widening is None else self._widening[layers]
        target = balance(loads, shape, uncertainty=widening)
        moves = plan_moves(before, target, config.nodes_apart)
        self._moves += [replace(move, layer=move.layer + first) for move in moves]
        self._by_device.append((_on_devices(before, loads, config), _on_devices(target, loads, config)))
        self.num_left -= len(loads)

    def finish(self, pinned_layers: frozenset[int] = frozenset()) -> RebalancePlan:
        """The plan once no layer is left. ValueError before that."""
        if self.num_left:
            raise ValueError(f"{self.num_left} layers are not planned yet")
        was, becomes = (np.concatenate(parts) for parts in zip(*self._by_device, strict=True))
        num_moves = np.bincount([move.layer for move in self._moves], minlength=len(was))
        is_worth = was.max(axis=1) - becomes.max(axis=1) > num_moves * self.config.min_saving
        is_worth[_checked(pinned_layers, self.placement)] = False
        kept = tuple(move for move in self._moves if is_worth[move.layer])
        return _priced(kept, was, np.where(is_worth[:, None], becomes, was), self.config)


def _like(placement: ExpertPlacement, slot_experts: np.ndarray) -> ExpertPlacement:
    """On the same devices, with these layers."""
    return ExpertPlacement(slot_experts, placement.num_devices, placement.num_experts)


def _moved(before: ExpertPlacement, moves: Iterable[Move]) -> np.ndarray:
    """[L, S]: slot_experts after the moves."""
    slot_experts = before.slot_experts.copy()
    for move in moves:
        old = slot_experts[move.layer, move.to_slot]
        slot_experts[move.layer, move.to_slot] = move.expert
        if move.is_exchange:
            slot_experts[move.layer, move.from_slot] = old
    return slot_experts


def _priced(
    moves: tuple[Move, ...], was: np.ndarray, becomes: np.ndarray, config: PlanConfig
) -> RebalancePlan:
    """With loads of devices [L, D] before and after the moves."""
    saved = float((was.max(axis=1) - becomes.max(axis=1)).sum())
    num_transfers = sum(1 for _ in transfers(moves))
    return RebalancePlan(
        moves,
        imbalance(was),
        imbalance(becomes),
        saved,
        num_transfers * config.move_s,
        saved * config.row_s * config.plan_life_steps,
    )


def _on_devices(placement: ExpertPlacement, loads: np.ndarray, config: PlanConfig) -> np.ndarray:
    return device_loads(placement, loads, slot_shares(placement, loads, config.balance_weight))


def _checked(pinned_layers: frozenset[int], placement: ExpertPlacement) -> list[int]:
    outside = sorted(layer for layer in pinned_layers if not 0 <= layer < placement.num_layers)
    if outside:
        raise ValueError(f"pinned_layers must be in [0, {placement.num_layers}), not {outside}")
    return sorted(pinned_layers)
