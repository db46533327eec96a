"""From a sweep's figures to a configuration file whose comments say what each value rests on. Pure; imports no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.bench.sweep_zones import BatchPoint, Zones, find_zones
from runtime.ladder.ladder import default_decode_rows

NEAR = 0.05  # differences in tokens/s or step time below this are not told apart
MAX_SHARE = (
    0.5  # of the promised time between tokens that the largest step may take; the engine bounds bursts alike
)
BASE_SHARE = MAX_SHARE / 4  # the published presets start at a quarter of their largest size
ADJUST_STEPS = 20
ADJUST_S = (0.2, 0.5)  # bounds of dynamic_adjust_window and of dynamic_batch_window as published
BATCH_S = (0.03, 0.05)


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """`num` prompts of `length` tokens computed together, and the prompt tokens/s of that."""

    num: int
    length: int
    tokens_s: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Values for the configuration; windows in seconds. `reasons` holds a sentence for each field."""

    base_batch_size: int
    max_batch_size: int
    micro_batch_size: int
    max_micro_batch_size: int
    dynamic_adjust_window_s: float
    dynamic_batch_window_s: float
    decode_rows: tuple[int, ...]
    row_slots: int
    reasons: dict[str, str]


def recommend(
    points: Sequence[BatchPoint], shapes: Sequence[PrefillShape], itl_s: float, prefill_step: int
) -> Recommendation:
    """`itl_s`: the promised time between tokens; `prefill_step`: tokens of the largest prefill rung."""
    zones = find_zones(points)
    largest = max_batch(points, zones, itl_s)
    quick = max((p.batch for p in points if p.step_s <= BASE_SHARE * itl_s), default=1)
    base = min(max(zones.fair_until, quick), largest.batch)
    best = max(shapes, key=lambda s: s.tokens_s)
    micro = max(s.num for s in shapes if s.tokens_s >= (1 - NEAR) * best.tokens_s)
    micro = min(micro, largest.batch)
    rows = useful_rows(points, largest.batch)
    slots = max(p.batch for p in points if p.batch <= 2 * largest.batch)
    prefill_s = prefill_step / best.tokens_s
    reasons = {
        "base_batch_size": f"the larger of two: last size before latency outgrows tokens/s, {zones.fair_until}, and last size "
        f"with a step within {_ms(BASE_SHARE * itl_s)}, an eighth of the time promised between tokens "
        f"(zones: {describe(zones)})",
        "max_batch_size": f"largest size with a step within {_ms(MAX_SHARE * itl_s)} (here {_ms(largest.step_s)}), half of the "
        "time promised between tokens as prefill steps come between, and before tokens/s are flat",
        "micro_batch_size": f"most prompts in one prefill within {NEAR:.0%} of the best shape, {best.num} x {best.length} "
        f"at {best.tokens_s:.0f} tokens/s",
        "max_micro_batch_size": "twice micro_batch_size, at most max_batch_size",
        "dynamic_adjust_window": f"{ADJUST_STEPS} steps at max_batch_size take {_ms(ADJUST_STEPS * largest.step_s)}; "
        f"kept within {_ms(ADJUST_S[0])} to {_ms(ADJUST_S[1])}",
        "dynamic_batch_window": f"one prefill of {prefill_step} tokens takes {_ms(prefill_s)}; kept within {_ms(BATCH_S[0])} "
        f"to {_ms(BATCH_S[1])}",
        "decode_rows": f"the default steps, less those whose step is within {NEAR:.0%} of the next one's (interpolated "
        "between measured sizes)",
        "row_slots": "the largest measured size up to twice max_batch_size: room to raise it live",
    }
    return Recommendation(
        base_batch_size=base,
        max_batch_size=largest.batch,
        micro_batch_size=micro,
        max_micro_batch_size=max(micro, min(2 * micro, largest.batch)),
        dynamic_adjust_window_s=_clip(_round_to(ADJUST_STEPS * largest.step_s, 0.05), *ADJUST_S),
        dynamic_batch_window_s=_clip(_round_to(prefill_s, 0.005), *BATCH_S),
        decode_rows=rows,
        row_slots=slots,
        reasons=reasons,
    )


def max_batch(points: Sequence[BatchPoint], zones: Zones, itl_s: float) -> BatchPoint:
    """The largest size within its share of the promise and before the flat zone; the smallest when there is none."""
    end = zones.no_gain_from or points[-1].batch
    kept = [p for p in points if p.step_s <= MAX_SHARE * itl_s and p.batch <= end]
    return kept[-1] if kept else points[0]


def useful_rows(points: Sequence[BatchPoint], max_rows: int) -> tuple[int, ...]:
    """Rungs that are quicker than the next larger rung by more than NEAR; max_rows always."""
    rows = [max_rows]
    for size in reversed(default_decode_rows(max_rows)[:-1]):
        if step_s_at(points, size) < (1 - NEAR) * step_s_at(points, rows[-1]):
            rows.append(size)
    return tuple(reversed(rows))


def step_s_at(points: Sequence[BatchPoint], batch: int) -> float:
    """Step time of a size by straight lines between the measured ones; at the ends the nearest."""
    below = [p for p in points if p.batch <= batch]
    above = [p for p in points if p.batch >= batch]
    if not below or not above:
        return (above or below[-1:])[0].step_s
    a, b = below[-1], above[0]
    share = (batch - a.batch) / (b.batch - a.batch) if b.batch > a.batch else 0.0
    return a.step_s + share * (b.step_s - a.step_s)


def describe(zones: Zones) -> str:
    """The zones in a few words."""
    parts = [f"small to {zones.small_until}"]
    if zones.large_from:
        parts.append(f"large from {zones.large_from}")
    parts += [f"dip {s.start} to {s.end}" for s in zones.dips]
    parts.append(f"no gain from {zones.no_gain_from}" if zones.no_gain_from else "no flat zone seen")
    return ", ".join(parts)


def to_yaml(found: Recommendation, origin: str) -> str:
    """The file. `origin` is one line that says what was measured, where and when."""
    values = {
        "batch_processing": {
            "base_batch_size": found.base_batch_size,
            "max_batch_size": found.max_batch_size,
            "micro_batch_size": found.micro_batch_size,
            "max_micro_batch_size": found.max_micro_batch_size,
            "dynamic_adjust_window": _ms(found.dynamic_adjust_window_s),
            "dynamic_batch_window": _ms(found.dynamic_batch_window_s),
        },
        "ladder": {"decode_rows": list(found.decode_rows), "row_slots": found.row_slots},
    }
    lines = [f"# {origin}"]
    for section, fields in values.items():
        lines.append(f"{section}:")
        for name, value in fields.items():
            lines += [f"  # {found.reasons[name]}", f"  {name}: {value}"]
    return "\n".join(lines) + "\n"


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f}ms" if ms >= 10 else f"{ms:.2g}ms"


def _round_to(value: float, step: float) -> float:
    return round(value / step) * step


def _clip(value: float, low: float, high: float) -> float:
    return min(high, max(low, value))
