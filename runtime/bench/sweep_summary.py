"""From the rounds of a sweep to its result: medians, spreads, utilisation, zones, the recommended file."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import yaml

from runtime.bench.limits import MachineLimits
from runtime.bench.offline import mean_limits
from runtime.bench.report import spread_percent
from runtime.bench.roofline import ModelShape
from runtime.bench.sweep_measure import Round
from runtime.bench.sweep_plan import PREFILL_STEP, SweepPlan
from runtime.bench.sweep_recommend import PrefillShape, recommend, to_yaml
from runtime.bench.sweep_zones import BatchPoint, find_zones
from runtime.bench.utilisation import decode_utilisation, prefill_utilisation
from runtime.config import EngineConfig, parse_config
from runtime.ladder.ladder import BucketLadder
from runtime.schedule.plan import Phase


def summarise(
    plan: SweepPlan,
    shape: ModelShape,
    config: EngineConfig,
    rounds: Sequence[Round],
    limits: Sequence[MachineLimits | None],
    max_context: int,
) -> dict[str, Any]:
    """Medians and spreads over rounds. `limits` has one more entry than `rounds`: before the first, after each."""
    dtype = config.model.dtype
    around = [None if a is None or b is None else mean_limits(a, b, None) for a, b in pairwise(limits)]
    decode = []
    for batch in plan.batches:
        samples = [r.decode[batch] for r in rounds]
        rates = [s.window.tokens_s for s in samples]
        context = plan.input_len + plan.new_tokens(batch) // 2
        used = [
            decode_utilisation(shape, batch, context, rate, limit, dtype)
            for rate, limit in zip(rates, around, strict=True)
            if limit is not None
        ]
        decode.append(
            {
                "batch": batch,
                "step_ms": _median_ms([s.window.step_s for s in samples]),
                "request_ms": _median_ms([s.request_s for s in samples]),
                "tokens_s": round(statistics.median(rates), 1),
                "spread_percent": spread_percent(rates),
                "utilisation": _share([u.value for u in used]),
                "memory_share": _share([u.memory for u in used]),
                "compute_share": _share([u.compute for u in used]),
                "rounds": [round(rate, 1) for rate in rates],
            }
        )
    points = [BatchPoint(c["batch"], c["step_ms"] / 1e3, c["tokens_s"]) for c in decode]
    return {
        "input": plan.input_len,
        "output": plan.output_len,
        "num_rounds": len(rounds),
        "limits": [limit and asdict(limit) for limit in limits],
        "decode": decode,
        "zones": asdict(find_zones(points)),
        "prefill_shapes": _shapes(plan, shape, rounds, around, dtype),
        "alignment": _alignment(plan, config, rounds, max_context),
    }


def add_recommendation(result: dict[str, Any], itl_s: float) -> None:
    """Put the recommended values and their YAML into the result; the YAML is parsed as the server would."""
    points = [BatchPoint(c["batch"], c["step_ms"] / 1e3, c["tokens_s"]) for c in result["decode"]]
    shapes = [PrefillShape(c["num"], c["length"], c["tokens_s"]) for c in result["prefill_shapes"]]
    found = recommend(points, shapes, itl_s, PREFILL_STEP)
    machine = result["machine"]
    text = to_yaml(
        found,
        f"Measured by `python -m runtime.bench sweep` with {result['model']} on {machine['cores']} cores {machine['cpu']}, "
        f"jax {machine['jax']}, {machine['taken'][:10]}.",
    )
    parse_config(yaml.safe_load(text))
    result["recommended"] = asdict(found) | {"yaml": text}


def _shapes(
    plan: SweepPlan,
    shape: ModelShape,
    rounds: Sequence[Round],
    around: Sequence[MachineLimits | None],
    dtype: str,
) -> list[dict[str, Any]]:
    cases = []
    for num, length in plan.shapes:
        rates = [num * length / r.shapes[num, length] for r in rounds]
        used = [
            prefill_utilisation(shape, length, num, rate, limit, dtype).value
            for rate, limit in zip(rates, around, strict=True)
            if limit is not None
        ]
        cases.append(
            {
                "num": num,
                "length": length,
                "tokens_s": round(statistics.median(rates), 1),
                "spread_percent": spread_percent(rates),
                "utilisation": _share(used),
            }
        )
    return cases


def _alignment(
    plan: SweepPlan, config: EngineConfig, rounds: Sequence[Round], max_context: int
) -> list[dict[str, Any]]:
    """Single prompts at a boundary and one token above: positions computed by the rung, and the time."""
    ladder = BucketLadder.from_config(config, max_context)
    page = config.kv_cache.page_size
    cases = []
    for length in plan.lengths:
        aligned = -(-length // page) * page
        rung = ladder.pick(Phase.PREFILL, min(aligned, PREFILL_STEP), 1, lambda bucket: True)
        seconds = [r.lengths[length] for r in rounds]
        cases.append(
            {
                "length": length,
                "rung_tokens": rung.tokens,
                "padding_percent": round(100 * rung.waste(min(length, PREFILL_STEP)), 1),
                "prefill_ms": _median_ms(seconds),
                "spread_percent": spread_percent(seconds),
            }
        )
    return cases


def _median_ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def _share(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None
