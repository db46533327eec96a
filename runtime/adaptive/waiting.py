"""Waiting: how prefill steps go between decode steps, and how long requests wait for company. Imports no JAX.

A decoding row sees a gap of the prefill steps launched in a row plus one decode launch, whose tokens come together.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from runtime.adaptive.choice import Choice, Reason, is_stale
from runtime.adaptive.observation import Observation
from runtime.config import EngineConfig
from runtime.schedule.policy import SchedulePolicy

DEFAULTS = SchedulePolicy()
PRESSING = 0.5  # share of urgent_wait_s from which the whole gap that rows can bear goes to prefill
MAX_STEPS = 8  # beyond this the one who waits pays more than the launch saves
NEARLY = 0.9
MAX_PREFILLS_IN_A_ROW = (
    8  # beyond this the choice is about prefill only, and a wrong measurement would starve rows
)


def decide_waiting(
    policy: SchedulePolicy, obs: Observation, config: EngineConfig, now_s: float
) -> tuple[SchedulePolicy, Choice]:
    """The policy with new numbers for waiting; the value of the choice is `max_prefills_in_a_row`.

    When measured times are stale or missing, what was chosen on them holds; what config alone says is always taken.
    """
    policy = follow_config(policy, config)
    prefill_s, decode_s = _seconds(obs.prefill_step_s), _seconds(obs.decode_step_s)
    if not config.batch_processing.enable_dynamic_batch:
        prefills, steps, window_s, reason = _fixed()
    elif is_stale(obs, config, now_s):
        prefills, steps, window_s = _held(policy)
        reason = Reason.STALE
    elif prefill_s is None or decode_s is None:
        prefills, steps, _ = _held(policy)
        window_s, reason = 0.0, Reason.MISSING_DATA
    else:
        # A promise that is broken already is no reason to hurry.
        is_urgent = obs.num_waiting > 0 and policy.urgent_wait_s <= obs.oldest_wait_s < config.slo.ttft
        is_pressing = obs.num_waiting > 0 and obs.oldest_wait_s >= PRESSING * policy.urgent_wait_s
        most = MAX_PREFILLS_IN_A_ROW if is_pressing else DEFAULTS.max_prefills_in_a_row
        fitting = fitting_steps(prefill_s, decode_s, config.slo.itl)
        prefills = choose_prefills(prefill_s, fitting * decode_s, config.slo.itl, most)
        steps = 1 if is_urgent else max(fitting, promised_steps(prefills * prefill_s, decode_s, config))
        window_s = choose_window(policy, obs, prefill_s, config.batch_processing.dynamic_batch_window)
        reason = Reason.GAP_FITS
        if obs.num_running == 0:
            reason = Reason.NOTHING_DECODES
        elif is_urgent:
            prefills, reason = max(prefills, DEFAULTS.max_prefills_in_a_row), Reason.URGENT
        elif prefills * prefill_s + steps * decode_s > config.slo.itl:
            reason = Reason.GAP_TOO_LONG
        elif is_pressing:
            reason = Reason.PRESSING
    is_fixed = reason is Reason.FIXED
    chosen = replace(
        policy,
        max_prefills_in_a_row=prefills,
        steps_while_waiting=steps,
        batch_window_s=window_s,
        min_prefill_tokens=0 if is_fixed else choose_fill(obs.prefill_step_s_by_tokens),
    )
    inputs = {
        "prefill_step_s": prefill_s,
        "decode_step_s": decode_s,
        "oldest_wait_s": obs.oldest_wait_s,
        "num_waiting": obs.num_waiting,
        "num_running": obs.num_running,
        "itl_s": config.slo.itl,
        "steps_while_waiting": steps,
        "batch_window_s": window_s,
        "min_prefill_tokens": chosen.min_prefill_tokens,
        "urgent_wait_s": policy.urgent_wait_s,
        "length_multiple": policy.length_multiple,
    }
    return chosen, Choice(prefills, reason, inputs)


def follow_config(policy: SchedulePolicy, config: EngineConfig) -> SchedulePolicy:
    """The policy with what config alone decides about waiting."""
    controller = config.controller
    return replace(
        policy,
        batch_window_s=min(policy.batch_window_s, config.batch_processing.dynamic_batch_window),
        urgent_wait_s=controller.ttft_slack * config.slo.ttft,
        length_multiple=controller.length_multiple if controller.like_lengths else 0,
    )


def fitting_steps(prefill_s: float, decode_s: float, itl_s: float) -> int:
    """Decode steps of one launch while prefill work waits: one if two and a prefill step do not fit the target."""
    most = DEFAULTS.steps_while_waiting
    return most if prefill_s + most * decode_s <= itl_s else 1


def promised_steps(prefills_s: float, decode_s: float, config: EngineConfig) -> int:
    """Decode steps that a round needs to keep the promise over a whole answer.

    In a round of prefill steps (`prefills_s` seconds in all) and n decode steps each row gets n tokens, so it pays
    prefills_s / n + decode_s for each: n is the least that keeps this within the target between tokens, and no more
    than one launch may have.
    """
    most = min(config.ladder.max_decode_steps, MAX_STEPS)
    spare_s = config.slo.itl - decode_s
    if spare_s <= 0 or prefills_s >= most * spare_s:
        return most
    return max(1, math.ceil(prefills_s / spare_s - 1e-9))  # a rounding error is no step


def choose_fill(step_s_by_tokens: Mapping[int, float]) -> int:
    """Tokens that a prefill step should hold while the line is longer than what fits: the largest rung that computes
    nearly as many tokens a second as the best one, as each prefill step also breaks a decode launch off. 0 where fewer
    than two rungs were measured."""
    rates = {tokens: tokens / step_s for tokens, step_s in step_s_by_tokens.items() if step_s > 0}
    if len(rates) < 2:
        return 0
    best = max(rates.values())
    return max(tokens for tokens, rate in rates.items() if rate >= NEARLY * best)


def choose_prefills(prefill_s: float, decode_launch_s: float, itl_s: float, most: int) -> int:
    """Prefill steps in a row, up to `most`, that fit the target together with a decode launch; 1 if not even one
    does, as waiting requests must get on."""
    fitting = (n for n in range(most, 1, -1) if n * prefill_s + decode_launch_s <= itl_s)
    return next(fitting, 1)


def choose_window(policy: SchedulePolicy, obs: Observation, prefill_s: float, longest_s: float) -> float:
    """How long requests may be held back for company.

    A merged request saves at most one prefill step, so holding it longer than one takes cannot pay. Nor does it
    when nothing decodes (only the device would wait), when a full micro-batch waits, or when none waits: the next
    one is likely to stay alone. Never beyond the point at which the oldest gets urgent.
    """
    if obs.num_running == 0 or not 0 < obs.num_waiting < policy.micro_batch_size:
        return 0.0
    slack_s = policy.urgent_wait_s - obs.oldest_wait_s
    return max(0.0, min(longest_s, prefill_s, slack_s))


def _fixed() -> tuple[int, int, float, Reason]:
    return DEFAULTS.max_prefills_in_a_row, DEFAULTS.steps_while_waiting, 0.0, Reason.FIXED


def _held(policy: SchedulePolicy) -> tuple[int, int, float]:
    return policy.max_prefills_in_a_row, policy.steps_while_waiting, policy.batch_window_s


def _seconds(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value >= 0 else None
