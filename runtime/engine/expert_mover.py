"""ExpertMover: moves experts' weights between slots while the engine serves. Owned by the engine's thread.

A few moves between two launches, each a donated copy of one expert in one layer together with the layer's table of copies:
the next launch reads the new table and the new weights, launches before it the old ones. Nothing is compiled.
"""

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np

from runtime.engine.engine import Engine
from runtime.engine.expert_status import OverlapChoice
from runtime.experts.copies import copies_table
from runtime.experts.move_order import transfers
from runtime.experts.placement import ExpertPlacement, Move, moved


class MisfitError(Exception):
    """A move does not fit the placement; the moves before it were made, those behind it are dropped."""


class ExpertMover:
    """The moves that wait, and the placement as it serves."""

    def __init__(self, engine: Engine, placement: ExpertPlacement) -> None:
        self.placement = placement
        self.num_applied = 0  # since the start
        self._engine = engine
        self._waiting: deque[Move] = deque()
        self._move_s: float | None = None

    @property
    def overlap(self) -> tuple[OverlapChoice, ...]:
        """Rungs of the engine that were measured in both forms."""
        return tuple(self._engine.forms.choices.values())

    @property
    def move_s(self) -> float:
        """What the copy of one expert adds to a step, in seconds; measured when it is first asked for."""
        if self._move_s is None:
            self._move_s = self._engine.measure_move()
        return self._move_s

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def order(self, moves: Iterable[Move]) -> None:
        """Moves to apply in this order; those that still wait are dropped, which is safe after any move."""
        self._waiting = deque(moves)

    def add(self, moves: Iterable[Move]) -> None:
        """Further moves behind those that wait."""
        self._waiting.extend(moves)

    def drop(self) -> None:
        self._waiting.clear()

    def drop_layers(self, layers: Container[int]) -> int:
        """Drop what waits for these layers, which no other layer's moves depend on; returns how many moves."""
        before = len(self._waiting)
        self._waiting = deque(move for move in self._waiting if move.layer not in layers)
        return before - len(self._waiting)

    def turn(self, max_moves: int) -> int:
        """Between two launches: apply up to so many moves; returns how many.

        Raises MisfitError, and nothing else that serving could go on after: an engine that fails half way has devices and
        placement apart.
        """
        rows: dict[int, np.ndarray] = {}  # layers that change, as they are by now
        fitting: list[Move] = []
        misfit: ValueError | None = None
        for move in islice(self._waiting, max_moves):
            try:
                # Refused before anything is copied, if the placement is not what the order took it to be.
                rows[move.layer] = moved(self.placement, move, rows.get(move.layer))
            except ValueError as error:
                misfit = error
                break
            fitting.append(move)
        for _ in fitting:
            self._waiting.popleft()
        if fitting:
            self._make(fitting, rows)
        if misfit is not None:
            self._waiting.clear()
            raise MisfitError(str(misfit)) from misfit
        return len(fitting)

    def _make(self, moves: Sequence[Move], rows: Mapping[int, np.ndarray]) -> None:
        """Moves that fit, which leave layers as `rows` says."""
        placement = self.placement.with_layers(rows)
        # No step reads a table between the launches of a turn, so each of a layer may bring the table of the last, although
        # it names slots whose weights the next one brings.
        tables = dict(zip(rows, copies_table(placement.only(list(rows))), strict=True))
        for layer, source in transfers(moves):
            self._engine.move_experts(layer, source, tables[layer])
        self.placement = placement
        self.num_applied += len(moves)

    def set_balance_weight(self, weight: float) -> None:
        """How unequally copies share their expert's rows, by the rows of each step; holds from the next launch on."""
        self._engine.set_balance_weight(weight)

    def set_lean(self, bias: np.ndarray, layers: Iterable[int] | None = None) -> None:
        """How far the choice of experts leans, float32 [L, E]: lossy, see `lean_between_experts`. Zeros take it back.

        layers: those that it is set for; None: all.
        """
        for index in range(self.placement.num_layers) if layers is None else layers:
            self._engine.lean_router(index, bias[index])
