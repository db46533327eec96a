"""Tables of a sweep on standard output. Imports no JAX."""

from typing import Any

from runtime.bench.report import print_table


def show(result: dict[str, Any]) -> None:
    """Everything that the JSON holds, shortened."""
    machine = result["machine"]
    steps = {step["end"]: step for step in result["zones"]["steps"]}
    rows = []
    for case in result["decode"]:
        step = steps.get(case["batch"], {})
        rows.append(
            (
                str(case["batch"]), case["step_ms"], case["request_ms"], case["tokens_s"], case["spread_percent"],
                _percent(case["utilisation"]), _percent(case["memory_share"]), _percent(case["compute_share"]),
                _percent(step.get("gain")), step.get("tokens_s_per_added_row"), step.get("zone"),
            )
        )  # fmt: skip
    print_table(
        f"{result['model']} on {machine['cores']} cores, jax {machine['jax']}: decode, {result['input']} in / "
        f"{result['output']} out, median of {result['num_rounds']} rounds",
        ("batch", "step ms", "request ms", "tokens/s", "spread %", "utilisation %", "memory %", "matrix %",
         "gain per doubling %", "tokens/s per added row", "zone"),
        rows,
    )  # fmt: skip
    zones = result["zones"]
    print(
        f"small until {zones['small_until']}, large from {zones['large_from'] or 'none seen'}, "
        f"no gain from {zones['no_gain_from'] or 'none seen'}, late_compiles={result['late_compiles']}"
    )
    print_table(
        "prefill: the same number of tokens as prompts x length",
        ("prompts x length", "tokens/s", "spread %", "utilisation %"),
        [
            (f"{c['num']} x {c['length']}", c["tokens_s"], c["spread_percent"], _percent(c["utilisation"]))
            for c in result["prefill_shapes"]
        ],
    )
    print_table(
        "alignment: one prompt, best of three in a round",
        ("length", "rung tokens", "padding %", "ms", "spread %"),
        [
            (str(c["length"]), c["rung_tokens"], c["padding_percent"], c["prefill_ms"], c["spread_percent"])
            for c in result["alignment"]
        ],
    )
    print_table(
        "warm-up: the first launch of a prefill rung in a fresh engine (without warm-up) against later ones (with it)",
        ("rung", "first ms", "later ms", "compile or load s"),
        [(c["rung"], c["first_ms"], c["later_ms"], c["compile_s"]) for c in result["warm_up"]["prefill"]],
    )
    print_table(
        "after warm-up: the first decode launch of a batch size against later first launches",
        ("batch", "first ms", "later ms"),
        [(str(c["batch"]), c["first_ms"], c["later_ms"]) for c in result["warm_up"]["decode_after"]],
    )
    print(result["recommended"]["yaml"], end="")


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)
