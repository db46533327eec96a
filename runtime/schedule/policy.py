"""The scheduler's choices as short pure functions, and the live numbers that steer them. Imports no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.schedule.plan import Phase


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    """Numbers that may change between any two steps; replaced whole.

    max_prefills_in_a_row: prefill steps launched one after another while rows could decode.
    steps_while_waiting: decode steps of one launch while prefill work, or a row that needs the host, stands ready.
    max_waste: share of row-steps of one decode launch that may fall on rows whose budget is used up.
    spare_pages_per_row: pages left free at an admission for each running sequence, so that those can grow.
    batch_size: most sequences that run at once; those above a new limit finish, none is preempted for it.
    micro_batch_size: most sequences in one prefill step.
    batch_window_s: longest time that waiting requests are held back for company while rows decode.
    urgent_wait_s: a request that has waited this long goes first, whatever decodes.
    min_prefill_tokens: while more wait than there is room for, and most rows decode, a prefill is held until so many
        tokens are ready: a fuller step computes more tokens a second.
    length_multiple: within the window requests whose prompts round up to the same multiple go together; 0: by arrival.
    """

    max_prefills_in_a_row: int = 2
    steps_while_waiting: int = 2
    max_waste: float = 0.25
    spare_pages_per_row: int = 1
    batch_size: int = 1 << 16
    micro_batch_size: int = 1 << 16
    batch_window_s: float = 0.0
    urgent_wait_s: float = float("inf")
    min_prefill_tokens: int = 0
    length_multiple: int = 0


def choose_phase(
    policy: SchedulePolicy, *, can_prefill: bool, can_decode: bool, prefills_in_a_row: int
) -> Phase | None:
    """Prefill first, as rows that decode together are cheap, but never so long that running requests stall."""
    if can_prefill and (not can_decode or prefills_in_a_row < policy.max_prefills_in_a_row):
        return Phase.PREFILL
    return Phase.DECODE if can_decode else None


def is_held(policy: SchedulePolicy, *, is_full: bool, longest_wait_s: float) -> bool:
    """Whether a prefill of new requests waits for more to join it while other rows decode.

    Each prefill step stalls the rows that decode, so two requests in one step stall them once; but a request does
    not wait beyond the window, nor when its promise is near.
    """
    return not is_full and longest_wait_s < min(policy.batch_window_s, policy.urgent_wait_s)


def choose_decode_steps(policy: SchedulePolicy, remaining: Sequence[int], max_steps: int) -> int:
    """Steps of one decode launch, given how many tokens each of its rows may still produce (all >= 1).

    The most steps that keep the idle share within `max_waste`: the device masks a row whose budget is used up, so
    one row near its end does not hold back the others, and many rows near their end do.
    """
    for steps in range(min(max_steps, max(remaining)), 1, -1):
        idle = sum(steps - r for r in remaining if r < steps)
        if idle <= policy.max_waste * steps * len(remaining):
            return steps
    return 1


def limit_burst(max_steps: int, step_s: float, itl_s: float) -> int:
    """Most decode steps of one launch, given the time of a step and the target between tokens.

    Clients get the tokens of a launch together, so the gap they see is that of the whole launch: it may take as long
    as the target. What goes before it, a prefill step, is the controllers' concern.
    """
    if step_s <= 0:
        return max_steps
    return min(max_steps, max(1, int(itl_s / step_s)))
