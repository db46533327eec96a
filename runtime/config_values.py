"""Values that a configuration writes as text: durations (`500ms`), sizes (`80%`, `20GiB`), UTC times."""

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainSerializer

_DURATION = re.compile(r"^(\d+(?:\.\d+)?)\s*(us|ms|s|min|h)$")
MIN_DURATION_S, MAX_DURATION_S = 1e-6, 366 * 86_400.0
_SECONDS = {"us": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600"}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(%|B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)$")
MAX_SIZE_BYTES = 2**50
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40} | {
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip


def parse_duration(value: object) -> float:
    """Seconds from `500ms`, `2s`, `15min`; a bare number is refused because its unit would be a guess."""
    if isinstance(value, str) and (m := _DURATION.match(value.strip())):
        return float(Decimal(m[1]) * Decimal(_SECONDS[m[2]]))  # 700ms is 0.7, not 0.7000000000000001
    raise ValueError(f"{value!r} is not a duration; write for example 500ms, 2s, 15min")


def _bounded_duration(seconds: float) -> float:
    """Timers overflow above, quotients of times below."""
    if seconds == 0 or MIN_DURATION_S <= seconds <= MAX_DURATION_S:
        return seconds
    raise ValueError(f"{seconds:g} s is neither 0s nor between 1us and {MAX_DURATION_S / 3600:g}h")


class Size(BaseModel):
    """A size: `fraction` of something (0 to 1), or `num_bytes`; exactly one is set."""

    model_config = ConfigDict(frozen=True)
    fraction: float | None = None
    num_bytes: int | None = None

    def of(self, total: int) -> int:
        """Bytes, given what 100 % means."""
        return self.num_bytes if self.num_bytes is not None else int(total * (self.fraction or 0.0))

    def __str__(self) -> str:
        return f"{self.num_bytes}B" if self.num_bytes is not None else f"{100 * (self.fraction or 0):g}%"


def parse_size(value: object) -> Size:
    """Size from `80%`, `20GiB`."""
    if isinstance(value, Size):
        return value
    if isinstance(value, str) and (m := _SIZE.match(value.strip())):
        number = float(m[1])
        if m[2] == "%" and number <= 100:
            return Size(fraction=number / 100)
        if m[2] != "%" and (num_bytes := number * _BYTES[m[2]]) <= MAX_SIZE_BYTES:
            return Size(num_bytes=int(num_bytes))
    raise ValueError(
        f"{str(value)[:80]!r} is not a size up to 100% or 1PiB; write for example 80%, 512MiB, 20GiB"
    )


def parse_address(value: str) -> tuple[str, int]:
    """(host, port) of `10.0.0.1:9800` or `[fd00::1]:9800`, brackets taken off; the port leaves room for one above it."""
    host, _, port = value.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if (
        host
        and (":" not in host or is_bracketed)
        and port.isascii()
        and port.isdigit()
        and 0 < int(port) < 65535
    ):
        return host.removeprefix("[").removesuffix("]"), int(port)
    raise ValueError(
        f"{value[:80]!r} is not host:port with a port from 1 to 65534; write for example 10.0.0.1:9800 or [fd00::1]:9800"
    )


def duration_text(seconds: float) -> str:
    """The shortest text that parse_duration reads back as the same number."""
    exact = Decimal(repr(seconds))
    text = f"{(exact * 1000).normalize():f}ms" if 0 < seconds < 1 else f"{exact.normalize():f}s"
    return text if parse_duration(text) == seconds else f"{exact:f}s"


Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    AfterValidator(_bounded_duration),
    PlainSerializer(duration_text, return_type=str),
]
SizeField = Annotated[Size, BeforeValidator(parse_size), PlainSerializer(str, return_type=str)]
MIN_YEAR, MAX_YEAR = 2000, 2100


def _utc_time(value: object) -> object:
    """`2026-12-01T00:00:00Z`, or nothing. A time without its zone is refused because the zone would be a guess."""
    if value == "":
        return value
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        time = None
    if time is None or time.tzinfo is None or not MIN_YEAR <= time.year <= MAX_YEAR:
        raise ValueError(
            f"{str(value)[:80]!r} is not a time between {MIN_YEAR} and {MAX_YEAR} with its zone; write for example "
            "2026-12-01T00:00:00Z"
        )
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


UtcTime = Annotated[str, BeforeValidator(_utc_time)]
