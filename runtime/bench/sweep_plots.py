"""PNG plots of a sweep, by matplotlib without a display. Imported lazily: a server does not need it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d9741a", "#2e8b57", "#8a8f98"
ZONE_COLOURS = {"small": "#dcefdc", "fair": "#f3f6dc", "large": "#fbe9d3", "no-gain": "#f6d5d5"}
_DPI = 90


def require_matplotlib() -> Any:
    """matplotlib.pyplot on the Agg backend. Raises RuntimeError that says how to install it."""
    try:
        import matplotlib as mpl  # noqa: PLC0415

        mpl.use("Agg")
        from matplotlib import pyplot  # noqa: PLC0415
    except ImportError as error:
        raise RuntimeError("--plots needs matplotlib: pip install matplotlib") from error
    return pyplot


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """`batch.png`, `prefill.png` and `warm_up.png`; their paths."""
    pyplot = require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, drawer in (("batch", _batch), ("prefill", _prefill), ("warm_up", _warm_up)):
        figure = drawer(pyplot, result)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=_DPI, pil_kwargs={"optimize": True})
        pyplot.close(figure)
        written.append(path)
    return written


def _batch(pyplot: Any, result: dict[str, Any]) -> Any:
    """Tokens/s, latency and utilisation over the batch size, with the zones behind."""
    cases = result["decode"]
    batches = [c["batch"] for c in cases]
    figure, (rate, latency, used) = pyplot.subplots(
        3, 1, figsize=(7.8, 8.6), sharex=True, layout="constrained"
    )
    for axes in (rate, latency, used):
        _shade(axes, result["zones"]["steps"])
        axes.grid(alpha=0.35, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)

    rates = [c["tokens_s"] for c in cases]
    below = [max(0.0, c["tokens_s"] - min(c["rounds"])) for c in cases]
    above = [max(0.0, max(c["rounds"]) - c["tokens_s"]) for c in cases]
    rate.errorbar(
        batches,
        rates,
        yerr=[below, above],
        fmt="o-",
        color=BLUE,
        capsize=3,
        label="median, with the range over rounds",
    )
    rate.set_ylim(0, 1.25 * max(a + r for a, r in zip(above, rates, strict=True)))
    _label_points(rate, batches, rates, "{:.0f}", BLUE, (5, -13), "left")
    rate.set_ylabel("decode, tokens/s")
    rate.legend(loc="lower right", frameon=False, fontsize=9)

    step_ms = [c["step_ms"] for c in cases]
    latency.plot(batches, step_ms, "o-", color=ORANGE)
    latency.set_ylim(0, 1.22 * max(step_ms))
    _label_points(latency, batches, step_ms, "{:.3g}", ORANGE, (-4, 6), "right")
    latency.set_ylabel("time of a decode step, ms")

    if all(c["utilisation"] is not None for c in cases):
        for key, text, colour in (
            ("memory_share", "of measured read bandwidth", BLUE),
            ("compute_share", "of measured matrix rate", GREEN),
        ):
            used.plot(batches, [100 * c[key] for c in cases], "o-", color=colour, label=text)
        used.set_ylim(0, max(10.0, 128 * max(c["utilisation"] for c in cases)))
        used.legend(loc="upper left", frameon=False, fontsize=9)
    else:
        used.text(0.5, 0.5, "limits were not measured", transform=used.transAxes, ha="center")
    used.set_ylabel("utilisation, %")
    used.set_xscale("log", base=2)
    used.set_xlim(batches[0] / 1.6, batches[-1] * 1.6)
    used.set_xticks(batches, [str(b) for b in batches])
    used.minorticks_off()
    used.set_xlabel("batch size, rows decoding together")
    _zone_names(rate, result["zones"]["steps"])
    figure.suptitle(_title(result, "batch sizes"), fontsize=11)
    return figure


def _prefill(pyplot: Any, result: dict[str, Any]) -> Any:
    """Square against thin batches, and what lies just above a boundary."""
    figure, (shapes, lengths) = pyplot.subplots(1, 2, figsize=(10.4, 4.4), layout="constrained")
    cases = result["prefill_shapes"]
    bars = shapes.bar(
        [f"{c['num']} x {c['length']}" for c in cases], [c["tokens_s"] for c in cases], color=BLUE
    )
    shapes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
    shapes.set_ylim(0, 1.12 * max(c["tokens_s"] for c in cases))
    shapes.set_xlabel("prompts x tokens of each (same total)")
    shapes.set_ylabel("prefill, prompt tokens/s")
    shapes.tick_params(axis="x", labelsize=8)
    shapes.set_title("square and thin batches", fontsize=10)

    padded = result["alignment"]
    colours = [GREEN if c["padding_percent"] == 0 else ORANGE for c in padded]
    names = [f"{c['length']}\n(rung {c['rung_tokens']})" for c in padded]
    bars = lengths.bar(names, [c["prefill_ms"] for c in padded], color=colours)
    lengths.bar_label(
        bars,
        labels=[f"{c['prefill_ms']:.3g}\n{c['padding_percent']:.0f} % pad" for c in padded],
        fontsize=8,
        padding=2,
    )
    lengths.set_ylim(0, 1.22 * max(c["prefill_ms"] for c in padded))
    lengths.set_xlabel("prompt tokens, one prompt")
    lengths.set_ylabel("prefill, ms")
    lengths.tick_params(axis="x", labelsize=8)
    lengths.set_title("at a boundary and one token above", fontsize=10)
    for axes in (shapes, lengths):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.35, linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(_title(result, "prefill"), fontsize=11)
    return figure


def _warm_up(pyplot: Any, result: dict[str, Any]) -> Any:
    """First launch of every prefill rung beside its later ones; first decode launches after warm-up below."""
    prefill, decode = result["warm_up"]["prefill"], result["warm_up"]["decode_after"]
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(7.8, 2.6 + 0.27 * (len(prefill) + len(decode))), sharex=True, layout="constrained",
        height_ratios=(len(prefill) + 1, len(decode) + 1),
    )  # fmt: skip
    _dumbbells(upper, [c["rung"] for c in prefill], prefill)
    upper.set_title("prefill rungs of a fresh engine: first launch (no warm-up) and later ones", fontsize=10)
    _dumbbells(lower, [f"{c['batch']} rows" for c in decode], decode)
    lower.set_title("decode in a warmed-up engine: first launch with all rows, and later ones", fontsize=10)
    lower.set_xscale("log")
    times = [c[key] for c in (*prefill, *decode) for key in ("first_ms", "later_ms")]
    ticks = [
        m * 10.0**e for e in range(-3, 6) for m in (1, 2, 5) if min(times) / 2 < m * 10.0**e < max(times) * 2
    ]
    lower.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    lower.minorticks_off()
    lower.set_xlabel("time of a launch, ms (logarithmic)")
    lower.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=2, frameon=False, fontsize=9)
    figure.suptitle(_title(result, "first launches"), fontsize=11)
    return figure


def _dumbbells(axes: Any, names: Sequence[str], cases: Sequence[dict[str, Any]]) -> None:
    """A line from the later to the first time of each case."""
    places = range(len(cases))
    first, later = [c["first_ms"] for c in cases], [c["later_ms"] for c in cases]
    axes.hlines(places, later, first, color=GREY, linewidth=1)
    axes.plot(first, places, "o", color=ORANGE, label="first launch")
    axes.plot(later, places, "o", color=BLUE, label="later launches (median)")
    axes.set_yticks(places, names, fontsize=8)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", which="both", alpha=0.3, linewidth=0.6)


def _shade(axes: Any, steps: Sequence[dict[str, Any]]) -> None:
    for step in steps:
        axes.axvspan(step["start"], step["end"], color=ZONE_COLOURS[str(step["zone"])], linewidth=0, zorder=0)


def _zone_names(axes: Any, steps: Sequence[dict[str, Any]]) -> None:
    for step in steps:
        axes.text(
            (step["start"] * step["end"]) ** 0.5, 1.01, f"{step['zone']}\n{100 * step['gain']:+.0f} %\nper doubling",
            transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=8, color="#444444",
        )  # fmt: skip


def _label_points(
    axes: Any,
    xs: Sequence[float],
    ys: Sequence[float],
    form: str,
    colour: str,
    offset: tuple[int, int],
    side: str,
) -> None:
    for x, y in zip(xs, ys, strict=True):
        axes.annotate(
            form.format(y), (x, y), offset, textcoords="offset points", ha=side, fontsize=8, color=colour
        )


def _title(result: dict[str, Any], what: str) -> str:
    machine = result["machine"]
    return f"{result['model']}, {what}: {machine['cores']} cores {machine['cpu']}, jax {machine['jax']}"
