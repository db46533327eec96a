"""Numbers as people read them: seconds, bytes, shares, money, ages. Pure functions; None is a dash."""

import math
from datetime import datetime, tzinfo
from decimal import Decimal

DASH = "\u2013"
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ("", "k", "M", "G", "T")


def seconds(value: float | None) -> str:
    """`0.85 ms`, `120 ms`, `2.4 s`, `3.5 min`, `2.1 h`."""
    if value is None or not math.isfinite(value):
        return DASH
    if abs(value) < 1:
        return f"{_short(1000 * value)} ms"
    if abs(value) < 120:
        return f"{_short(value)} s"
    return f"{_short(value / 60)} min" if abs(value) < 7200 else f"{_short(value / 3600)} h"


def num_bytes(value: float | None) -> str:
    """`812 B`, `1.5 MiB`."""
    if value is None or not math.isfinite(value):
        return DASH
    power = 0
    while abs(value) >= 1024 and power < len(_BYTES) - 1:
        value, power = value / 1024, power + 1
    return f"{_short(value)} {_BYTES[power]}"


def count(value: float | None) -> str:
    """`812`, `1.53 k`, `2.1 M`."""
    if value is None or not math.isfinite(value):
        return DASH
    power = 0
    while abs(value) >= 10_000 and power < len(_COUNTS) - 1:
        value, power = value / 1000, power + 1
    return f"{_short(value)} {_COUNTS[power]}".rstrip()


def percent(share: float | None) -> str:
    """A share of one as `97.5 %`; never 100 % or 0 % of what is not."""
    if share is None or not math.isfinite(share):
        return DASH
    text = f"{100 * share:.1f}"
    if text == "100.0" and share < 1:
        return "> 99.9 %"
    if text == "0.0" and share > 0:
        return "< 0.1 %"
    return f"{text.removesuffix('.0')} %"


def money(value: float | None, currency: str = "USD") -> str:
    """`0.0123 USD`, `12.50 USD`."""
    if value is None or not math.isfinite(value):
        return DASH
    text = f"{value:,.2f}" if abs(value) >= 1 or value == 0 else f"{Decimal(f'{value:.2g}'):f}"
    return f"{text} {currency}"


def age(value: float | None) -> str:
    """How old something is, in whole units: `3 s`, `4 min`, `2 h`, `5 d`."""
    if value is None or not math.isfinite(value):
        return DASH
    value = max(0.0, value)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s"


def clock(unix_s: float | None, zone: tzinfo | None = None) -> str:
    """Date and time of day of a Unix time, in `zone` or this machine's."""
    if unix_s is None or not math.isfinite(unix_s) or not 0 <= unix_s < 1e11:
        return DASH
    return datetime.fromtimestamp(unix_s, zone).strftime("%d %b %H:%M:%S")


def _short(value: float) -> str:
    """Three digits that matter, no exponent below a million."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.6f}".rstrip("0")
