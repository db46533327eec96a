"""The table of a check, from its lines; plain text, so that it needs no package."""

from collections.abc import Iterable
from typing import Any

from benchmarks.gpu.options import Line

_COLUMNS: dict[str, tuple[tuple[str, str, str], ...]] = {  # part: (title, field, format)
    "limits": (("TB/s", "bytes_per_s", "tera"), ("TFLOP/s", "flops_per_s", "tera"), ("spread", "spread", "percent")),
    "numerics": (("right", "is_right", "yes"), ("max error", "max_error", "3g"), ("values", "num_values", "int")),
    "kernels": (
        ("us", "us", "3g"), ("spread", "spread", "percent"), ("bound us", "bound_us", "3g"),
        ("of bound %", "percent_of_bound", "3g"), ("by", "limited_by", "text"), ("GB/s", "gbytes_per_s", "int"),
        ("TFLOP/s", "tflops_per_s", "3g"),
    ),
    "engine": (
        ("tokens/s", "tokens_s", "int"), ("spread %", "spread_percent", "3g"), ("bound", "bound_tokens_s", "int"),
        ("of bound %", "percent_of_bound", "3g"), ("first rung s", "first_rung_s", "3g"),
        ("all rungs s", "all_rungs_s", "3g"), ("compile s", "compile_s", "3g"), ("cached", "rungs_from_cache", "int"),
    ),
    "peers": (("us", "us", "3g"), ("theirs us", "their_us", "3g"), ("faster", "times_faster", "3g")),
}  # fmt: skip
_COLUMNS |= {"warm_start": _COLUMNS["engine"][4:], "torch": _COLUMNS["peers"]}
_ITEM_WIDTH, _WIDTH = 62, 13


def table(part: str, lines: Iterable[Line]) -> str:
    """A block of text: a row for each item; what was skipped or failed says why."""
    columns = _COLUMNS[part]
    rows = [f"== {part}".ljust(_ITEM_WIDTH) + "".join(title.rjust(_WIDTH) for title, _, _ in columns)]
    for line in lines:
        item = str(line["item"])[: _ITEM_WIDTH - 1].ljust(_ITEM_WIDTH)
        why = next((f"{word}: {line[word]}" for word in ("skipped", "failed") if word in line), None)
        cells = "".join(_cell(line.get(field), form).rjust(_WIDTH) for _, field, form in columns)
        rows.append(item + (why or cells))
    return "\n".join(rows)


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if form == "tera":
        return f"{value / 1e12:.4g}"
    if form == "percent":
        return f"{100 * value:.1f} %"
    if form == "yes":
        return "yes" if value else "NO"
    if form == "int":
        return f"{value:.0f}"
    return f"{value:.4g}" if form == "3g" else str(value)
