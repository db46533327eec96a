"""The pages of the engine's parts: buckets, experts, KV memory, scaling. Pure."""

from itertools import pairwise
from typing import Any

import numpy as np

from control_plane.console.history import EXPERT_POINTS, SPAN_S, ExpertPoint
from control_plane.console.lines import Lines, Series, ratio, series
from control_plane.console.placement import placement
from control_plane.console.residency import residency, residency_series
from control_plane.console.view import Move, View, envelope
from runtime.engine.stats import RungSnapshot

MAX_MOVES = 300
MAX_LINES = 12  # rungs with a line of their own


def buckets(view: View) -> dict[str, Any]:
    lines, s = Lines(view.points), view.snapshot
    gained = lines.rungs()
    busiest = sorted((n for n in gained if gained[n][0] > 0), key=lambda n: -gained[n][0])[:MAX_LINES]
    plots = [
        lines.gauge("batch_size", "requests"),
        lines.gauge("micro_batch_size", "requests"),
        _padding(lines, "prefill"),
        _padding(lines, "decode"),
        lines.total("late_compiles"),
        *lines.rung_hits(busiest),
    ]
    since_s = view.now_s - SPAN_S[view.span]
    moves = [move for move in view.moves if move.time_s >= since_s]
    return envelope(view, lines, plots) | {
        "rungs": [_rung(rung, gained.get(rung.name), lines.seconds) for rung in s.rungs] if s else [],
        "ladder": _ladder(view),
        "moves": [_move(move) for move in reversed(moves[-MAX_MOVES:])],
        "num_moves": len(moves),
        "reasons": [
            {"controller": controller, "reason": reason, "num": num}
            for (controller, reason), num in sorted(view.reasons.items())
        ],
    }


def experts(view: View) -> dict[str, Any]:
    found = view.experts
    tokens = found[-1].tokens - found[0].tokens if len(found) > 1 else None
    shape = tokens.shape if tokens is not None else (0, 0)
    window_s = found[-1].time_s - found[0].time_s if found else 0.0
    has_tokens = tokens is not None and bool(tokens.sum())
    return envelope(view) | {
        "step_s": SPAN_S[view.span] / EXPERT_POINTS,
        "times": np.array([p.time_s for p in found[1:]], np.float64).round(3),
        "series": _expert_series(found) + residency_series(found),
        "num_layers": shape[0],
        "num_experts": shape[1],
        "window_s": window_s,
        "tokens": tokens if tokens is not None else [],
        "imbalance": imbalance(tokens) if tokens is not None else [],
        "num_idle": int((tokens == 0).sum()) if tokens is not None and has_tokens else 0,
        "placement": placement(view),
        "residency": residency(view),
    }


def kv(view: View) -> dict[str, Any]:
    lines, s = Lines(view.points), view.snapshot
    plots = [
        lines.gauge("used_pages", "pages"),
        lines.gauge("cached_pages", "pages"),
        lines.share("hit_share", "prefix_hits", "prefix_queries"),
        lines.rate("cached_tokens", "tokens/s", "prefix_hits"),
        lines.rate("preemptions", "1/s"),
    ]
    why = "kv_cache.kv_cache_external is off: this version keeps KV on the device only"
    device: dict[str, Any] = {"available": False, "reason": "the model is not loaded"}
    if s is not None and s.num_pages:
        device = {
            "available": True,
            "capacity_bytes": s.num_pages * s.page_bytes,
            "used_bytes": s.used_pages * s.page_bytes,
            "num_pages": s.num_pages,
            "used_pages": s.used_pages,
            "cached_pages": s.cached_pages,
            "hit_share": lines.quotient("prefix_hits", "prefix_queries"),
        }
    return envelope(view, lines, plots) | {
        "page_size": s.page_size if s else 0,
        "page_bytes": s.page_bytes if s else 0,
        "prefix_cache_enabled": view.config.kv_cache.enable_prefix_cache,
        "looked_up_tokens": int(lines.gained("prefix_queries")),
        "found_tokens": int(lines.gained("prefix_hits")),
        "num_preemptions_span": int(lines.gained("preemptions")),
        "levels": [
            {"level": "L1", "place": "device"} | device,
            {"level": "L2", "place": "host", "available": False, "reason": why},
            {"level": "L3", "place": "shared store", "available": False, "reason": why},
        ],
    }


def scaling(view: View) -> dict[str, Any]:
    lines = Lines(view.points)
    alone = "this server is one process with one engine; nothing starts or stops workers"
    return envelope(view, lines, [series("workers", "1", np.ones(len(lines.times)))]) | {
        "num_workers": 1,
        "autoscaling": {"available": False, "reason": alone},
        "forecast": {"available": False, "reason": "this version has no forecast of traffic"},
    }


def imbalance(tokens: np.ndarray) -> np.ndarray:
    """Busiest expert over the mean of its layer, by layer; tokens [L, E]. NaN for a layer that saw nothing."""
    return ratio(tokens.max(axis=1).astype(np.float64), tokens.mean(axis=1))


def _expert_series(points: tuple[ExpertPoint, ...]) -> list[Series]:
    mean, most, rate = [], [], []
    for before, after in pairwise(points):
        tokens = after.tokens - before.tokens
        by_layer = imbalance(tokens)
        is_known = not np.isnan(by_layer).all()
        mean.append(np.nanmean(by_layer) if is_known else np.nan)
        most.append(np.nanmax(by_layer) if is_known else np.nan)
        rate.append(tokens.sum() / max(1e-3, after.time_s - before.time_s))
    return [
        series("expert_imbalance_mean", "1", np.array(mean)),
        series("expert_imbalance_max", "1", np.array(most)),
        series("routed_tokens", "tokens/s", np.array(rate)),
    ]


def _padding(lines: Lines, phase: str) -> Series:
    computed = lines.delta(f"{phase}_computed")
    return series("padding_share", "share", 1.0 - ratio(lines.delta(f"{phase}_real"), computed), phase)


def _rung(rung: RungSnapshot, gained: np.ndarray | None, seconds: float) -> dict[str, Any]:
    hits, real, computed, busy_s = (float(x) for x in gained) if gained is not None else (0.0,) * 4
    return {
        "name": rung.name,
        "phase": rung.phase,
        "size": rung.size,
        "state": rung.state,
        "error": rung.error,
        "hits": rung.hits,
        "hits_span": int(hits),
        "computed_span": int(computed),
        "occupancy": rung.real_tokens / rung.computed_tokens if rung.computed_tokens else None,
        "occupancy_span": real / computed if computed else None,
        "padding_span": int(computed - real),
        "step_s": rung.step_s or None,
        "busy_share_span": min(1.0, busy_s / seconds) if seconds > 0 else None,
        "compile_s": rung.compile_s,
        "from_cache": rung.from_cache,
        "temp_bytes": rung.temp_bytes,
    }


def _ladder(view: View) -> dict[str, Any] | None:
    if view.snapshot is None:
        return None
    change = view.snapshot.ladder_change
    return {
        "state": change.state,
        "rungs_to_add": change.rungs_to_add,
        "rungs_to_drop": change.rungs_to_drop,
        "error": change.error,
        "seconds": change.seconds,
        "max_rungs": view.config.ladder.max_rungs,
        "num_changes": change.number,
    }


def _move(move: Move) -> dict[str, Any]:
    return {
        "time": move.time_s,
        "number": move.number,
        "controller": move.controller,
        "previous": move.previous,
        "value": move.value,
        "reason": move.reason,
        "inputs": dict(move.inputs),
    }
