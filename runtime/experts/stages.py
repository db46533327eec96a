"""Work that waits for exchanges, as a generator: it yields a parcel to send and is handed what arrived.

Whoever runs it decides what happens in between, such as a stage of the other half of the tokens. A generator must hold no
named scope open at a yield: the scope would cover whatever is traced until it goes on.
"""

from collections.abc import Callable, Generator
from itertools import cycle
from typing import NamedTuple

import jax
from jax import lax
from jaxtyping import Array


class Parcel(NamedTuple):
    """Arrays [G * C, ...] whose g-th part goes to device g; the g-th part of what arrives came from there.

    scope: named scope of the exchange. axis: mesh axis of the devices.
    """

    scope: str
    axis: str
    arrays: tuple[Array, ...]


class Meeting(NamedTuple):
    """A place where the other lane's exchange shall have ended; the arrays come back as they are."""

    arrays: tuple[Array, ...]


type Stages[Result] = Generator[Parcel | Meeting, tuple[Array, ...], Result]


class Lane[Result](NamedTuple):
    """One half of a step. start: what it begins from; run: its stages. scope: named scope of its ops."""

    scope: str
    start: tuple[Array, ...]
    run: Callable[[tuple[Array, ...]], Stages[Result]]


def deliver(parcel: Parcel) -> tuple[Array, ...]:
    """What arrives when every device sends such a parcel."""
    with jax.named_scope(parcel.scope):
        return tuple(lax.all_to_all(a, parcel.axis, 0, 0, tiled=True) for a in parcel.arrays)


def run_alone[Result](stages: Stages[Result]) -> Result:
    """Runs to the end, each exchange where it stands."""
    try:
        yielded = next(stages)
        while True:
            arrived = deliver(yielded) if isinstance(yielded, Parcel) else yielded.arrays
            yielded = stages.send(arrived)
    except StopIteration as end:
        return end.value


def run_in_turns[Result](lanes: tuple[Lane[Result], Lane[Result]]) -> list[Result]:
    """Two lanes in turns, the first ahead: while a parcel of one is on its way, the other computes its next stage.

    A barrier at each turn ties what a lane is handed to the parcel that the other has just packed. So no stage starts before
    the one ahead of it has packed, which would leave that parcel with nothing beside it, and XLA cannot fuse small ops of both
    lanes into one that waits for both exchanges.
    """
    results: dict[int, Result] = {}
    running: dict[int, Stages[Result]] = {}
    handed = [lane.start for lane in lanes]
    packed: Parcel | None = None  # by the lane of the turn before, not sent yet
    for mine, other in cycle(((0, 1), (1, 0))):
        if packed is not None:
            handed[mine], arrays = lax.optimization_barrier((handed[mine], packed.arrays))
            with jax.named_scope(lanes[other].scope):
                handed[other] = deliver(packed._replace(arrays=arrays))
        try:
            with jax.named_scope(lanes[mine].scope):
                if mine in running:
                    packed = _until_parcel(running[mine], running[mine].send(handed[mine]), handed, other)
                else:
                    running[mine] = lanes[mine].run(handed[mine])
                    packed = _until_parcel(running[mine], next(running[mine]), handed, other)
        except StopIteration as end:
            results[mine], packed = end.value, None
        if len(results) == len(lanes):
            return [results[0], results[1]]
    raise AssertionError("cycle never ends")


def _until_parcel[Result](
    stages: Stages[Result], yielded: Parcel | Meeting, handed: list[tuple[Array, ...]], other: int
) -> Parcel:
    """On to the next parcel; at a meeting what was packed for the other lane is there before anything goes on."""
    while isinstance(yielded, Meeting):
        arrays, handed[other] = lax.optimization_barrier((yielded.arrays, handed[other]))
        yielded = stages.send(arrays)
    return yielded
