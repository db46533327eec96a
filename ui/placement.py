"""Where experts sit: the section of the Experts page, and what an operator may do about it."""

from typing import Any

import streamlit as st

from control_plane.expert_schemas import LoadForecast, Placement
from ui import session
from ui.act import attempt, may_change, show_told, tell
from ui.device_plots import copies_heat, device_bars, device_heat
from ui.frame import figures, mode, plots, unavailable
from ui.maps import words
from ui.plain import plain
from ui.units import DASH, age, count, percent, seconds

PLAN = "expert_plan"  # of the session: the dry run that is on the screen
REASON = "console: rebalance of experts"
MAX_LINES = 10  # of a list
MAX_KEY_CHARS = 40


def show_placement(placement: Placement) -> None:
    if unavailable(placement, "Placement over devices"):
        return
    if placement.alarm:
        st.error(f"**Rebalancing is overdue**: {plain(placement.alarm)}", icon=":material/warning:")
    if placement.is_paused:
        st.warning(
            "Experts do not move by themselves: an operator has paused it.", icon=":material/pause_circle:"
        )
    before, after = placement.imbalance_before, placement.imbalance_after
    has_moved = placement.plan_age_s is not None
    pinned = ", ".join(map(str, placement.pinned_layers))
    figures(
        (
            "Devices x slots",
            f"{placement.num_devices} x {placement.slots_per_device}",
            f"for each layer; {placement.num_copies} slots hold copies, all layers together",
        ),
        ("Imbalance now", _times(placement.imbalance_now), "busiest device over the mean; 1 is even"),
        (
            "Before → since",
            f"{_times(before)} → {_times(after)}" if has_moved else DASH,
            "imbalance around the last moves" if has_moved else "nothing has moved yet",
        ),
        ("Moves that wait", str(placement.moves_in_flight), f"{placement.num_moved} applied since the start"),
        (
            "Last moves",
            f"{age(placement.plan_age_s)} ago" if has_moved else DASH,
            f"the controller says: {words(placement.why) or 'nothing'}",
        ),
        ("Pinned layers", pinned[:40] or "none", "their experts stay where they are"),
    )
    if placement.forecast is not None:
        _show_forecast(placement.forecast)
    _controls(placement)
    looked = mode()
    plots(2, devices=device_bars(placement, looked), device_heat=device_heat(placement, looked))
    plots(1, copies=copies_heat(placement, looked))


def _show_forecast(forecast: LoadForecast) -> None:
    """A line about who forecasts, one about the traffic to come. Traffic keys are words of callers."""
    errors = sorted(forecast.errors.items(), key=lambda pair: pair[1])[:MAX_LINES]
    told = " · ".join(f"{plain(words(source))} {error:.3f}" for source, error in errors)
    st.caption(
        f"Load of the next window is forecast by: **{plain(words(forecast.source))}**"
        + (f". Error of late, 0 is exact: {told}" if told else "")
    )
    shares = sorted(forecast.next_traffic.items(), key=lambda pair: -pair[1])[:MAX_LINES]
    if not shares:
        return
    told = " · ".join(f"{plain(_one_line(key))} {percent(share)}" for key, share in shares)
    num_more = forecast.num_keys - len(shares)
    st.caption(f"Its traffic by key: {told}" + (f" · {num_more} more" if num_more > 0 else ""))


def _one_line(key: str) -> str:
    """Callers choose it: short, and without line breaks or signs that cannot be seen."""
    text = "".join(sign if sign.isprintable() else " " for sign in key[: MAX_KEY_CHARS + 1])
    return (text if len(text) <= MAX_KEY_CHARS else f"{text[:MAX_KEY_CHARS]}…") or "(no key)"


def _controls(placement: Placement) -> None:
    """For operators only."""
    show_told()
    if not may_change() or session.role() != "operator":
        return
    left, right, _ = st.columns([2, 2, 4])
    if left.button("Rebalance: dry run", key="rebalance_plan", icon=":material/balance:"):
        st.session_state[PLAN] = attempt(lambda: session.client().rebalance_experts(dry_run=True))
        st.session_state.pop("rebalance_sure", None)
        if st.session_state[PLAN] is None:
            show_told()
    label, icon = ("Resume moves", "play_arrow") if placement.is_paused else ("Pause moves", "pause")
    if right.button(label, key="pause_experts", icon=f":material/{icon}:"):
        _pause(not placement.is_paused)
    plan = st.session_state.get(PLAN)
    if plan is not None:
        with st.container(border=True, key="rebalance"):
            _show_plan(plan)


def _show_plan(plan: dict[str, Any]) -> None:
    num_moves, by_layer = plan["num_moves"], plan["moves_by_layer"]
    if not num_moves:
        st.markdown("**Dry run:** no move would pay. The experts stay where they are.")
        if st.button("Close", key="rebalance_close"):
            _forget()
        return
    num_layers = sum(num > 0 for num in by_layer)
    st.markdown(
        f"**Dry run:** {num_moves} moves in {num_layers} layers, at most {max(by_layer)} in one. "
        f"Imbalance **{_times(1 + plan['imbalance_before'])} → "
        f"{_times(1 + plan['imbalance_after'])}**, {count(plan['saved_rows'])} rows a step less on the busiest devices. "
        f"Copying takes about **{seconds(plan['cost_s'])}**, spread over steps; **{seconds(plan['saving_s'])}** are saved "
        "while the plan holds."
    )
    st.caption(
        "Planned anew for the load of that moment when it is applied. Answers stay the same throughout."
    )
    first, second, _ = st.columns([2, 2, 4])
    if not st.session_state.get("rebalance_sure"):
        if first.button("Apply", type="primary", key="rebalance_apply"):
            st.session_state["rebalance_sure"] = True
            st.rerun()
        if second.button("Drop it", key="rebalance_drop"):
            _forget()
        return
    st.markdown(f"Move about **{num_moves}** experts while the server answers?")
    if first.button("Yes, move them", type="primary", key="rebalance_confirm"):
        made = attempt(lambda: session.client().rebalance_experts(dry_run=False, reason=REASON))
        if made is not None:
            tell("success", f"{made['num_moves']} moves are ordered; a few are applied at each step.")
        _forget()
    if second.button("No", key="rebalance_no"):
        _forget()


def _pause(is_paused: bool) -> None:
    """The page tells the new state at the server's next tick."""
    if attempt(lambda: session.client().pause_experts(is_paused, "console")) is not None:
        does = "Paused: nothing moves by itself" if is_paused else "Resumed: experts move by themselves again"
        tell("success", f"{does}. The page shows it within a few seconds.")
    st.rerun()


def _forget() -> None:
    st.session_state.pop(PLAN, None)
    st.session_state.pop("rebalance_sure", None)
    st.rerun()


def _times(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"
