"""The server's JSON schema as a flat list of fields, and values of widgets as values of a patch. No Streamlit.

Nothing here knows a field's name: what the server adds to its schema appears in the console.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_TEXT_CHARS = 4096
_DURATION = re.compile(r"^\d+(\.\d+)?\s*(us|ms|s|min|h)$", re.ASCII)
_SIZE = re.compile(r"^\d+(\.\d+)?\s*(%|B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)$", re.ASCII)
CHANGES = {
    "live": "live: holds from the next step on",
    "recompile": "recompile: the old ladder serves until the new rungs are compiled",
    "restart": "restart: stored now, in force at the next start",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One setting as the schema describes it.

    kind: boolean, integer, number, string or array; item_kind: of an array's items. change: live, recompile or restart.
    low, high: bounds with is_low_open, is_high_open where they are excluded. unit: duration, size or None.
    why_idle: why a change does nothing in this version; "" when it does something. is_editable: not set in the file only.
    """

    path: str
    kind: str
    description: str
    change: str
    default: Any
    unit: str | None = None
    choices: tuple[Any, ...] = ()
    item_kind: str = "string"
    low: float | None = None
    high: float | None = None
    is_low_open: bool = False
    is_high_open: bool = False
    why_idle: str = ""
    is_editable: bool = True

    @property
    def section(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        return self.path.partition(".")[2]

    @property
    def allowed(self) -> str:
        """What may be entered, in words."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        if self.unit == "duration":
            return "a duration such as 500ms, 2s, 15min"
        if self.unit == "size":
            return "a size such as 80%, 512MiB, 20GiB"
        bounds = _bounds(self)
        if self.kind == "array":
            items = "whole numbers" if self.item_kind == "integer" else "words"
            return f"{items} with commas between, {bounds}".rstrip(", ")
        word = {"integer": "a whole number", "number": "a number", "boolean": "on or off"}.get(
            self.kind, "text"
        )
        return f"{word} {bounds}".rstrip()


def fields_of(schema: Mapping[str, Any]) -> list[Field]:
    """Every field of every section, in the server's order. What is no section of plain values is left out."""
    found = []
    for section, reference in schema.get("properties", {}).items():
        described = _resolved(schema, reference)
        for name, raw in described.get("properties", {}).items():
            if (field := _field(f"{section}.{name}", _resolved(schema, raw))) is not None:
                found.append(field)
    return found


def about(schema: Mapping[str, Any], section: str) -> str:
    """What the schema says of a whole section."""
    return str(_resolved(schema, schema.get("properties", {}).get(section, {})).get("description", ""))


def parse(field: Field, entered: Any) -> Any:
    """The JSON value of what was entered. Raises ValueError that says what is allowed.

    The server checks again, and knows more: this is so that a slip of the finger is told at once.
    """
    value = _typed(field, entered)
    numbers = value if field.kind == "array" and field.item_kind != "string" else [value]
    if field.kind in ("integer", "number", "array") and any(
        not isinstance(number, str) and not _is_within(field, number) for number in numbers
    ):
        raise ValueError(f"{field.path} is {entered!s}; it must be {field.allowed}")
    if field.choices and value not in field.choices:
        raise ValueError(f"{field.path} is {entered!s}; it must be {field.allowed}")
    return value


def shown(value: Any) -> str:
    """A JSON value as it is entered: lists with commas, on and off for booleans, "" for nothing."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return "" if value is None else str(value)


def _typed(field: Field, entered: Any) -> Any:
    if field.kind == "boolean":
        return bool(entered)
    if field.kind == "integer":
        return _integer(field, entered)
    if field.kind == "number":
        return _number(field, entered)
    text = str(entered).strip()
    if len(text) > MAX_TEXT_CHARS:
        raise ValueError(f"{field.path} has {len(text)} characters; at most {MAX_TEXT_CHARS} are allowed")
    if field.kind == "array":
        words = [word.strip() for word in text.split(",") if word.strip()]
        return [_integer(field, word) for word in words] if field.item_kind == "integer" else words
    pattern = {"duration": _DURATION, "size": _SIZE}.get(field.unit or "")
    if pattern is not None and not pattern.match(text):
        raise ValueError(f"{field.path} is {text[:80]!r}; it must be {field.allowed}")
    return text


def _integer(field: Field, entered: Any) -> int:
    if isinstance(entered, int):
        return entered
    if isinstance(entered, float) and entered.is_integer():
        return int(entered)
    text = str(entered)
    if not re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
        raise ValueError(f"{field.path} is {text[:80]!r}; it must be {field.allowed}")
    return int(text)


def _number(field: Field, entered: Any) -> float:
    try:
        value = float(entered)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{field.path} is {str(entered)[:80]!r}; it must be {field.allowed}")
    return value


def _is_within(field: Field, value: float) -> bool:
    is_above = field.low is None or (value > field.low if field.is_low_open else value >= field.low)
    is_below = field.high is None or (value < field.high if field.is_high_open else value <= field.high)
    return is_above and is_below


def _bounds(field: Field) -> str:
    low = None if field.low is None else f"{'above' if field.is_low_open else 'from'} {field.low:g}"
    high = None if field.high is None else f"{'below' if field.is_high_open else 'to'} {field.high:g}"
    return " ".join(filter(None, (low, high)))


def _field(path: str, raw: Mapping[str, Any]) -> Field | None:
    kind, items = raw.get("type"), raw.get("items", {})
    if kind not in ("boolean", "integer", "number", "string", "array"):
        return None
    bounds = items if kind == "array" else raw
    is_low_open, is_high_open = "exclusiveMinimum" in bounds, "exclusiveMaximum" in bounds
    return Field(
        path=path,
        kind=kind,
        description=str(raw.get("description", "")),
        change=str(raw.get("change", "live")),
        default=raw.get("default"),
        unit=raw.get("unit"),
        choices=tuple(raw.get("enum", ())),
        item_kind=items.get("type", "string"),
        low=bounds.get("exclusiveMinimum", bounds.get("minimum")),
        high=bounds.get("exclusiveMaximum", bounds.get("maximum")),
        is_low_open=is_low_open,
        is_high_open=is_high_open,
        why_idle="" if raw.get("has_effect", True) else str(raw.get("reason") or "it has no effect yet"),
        is_editable=not raw.get("file_only", False),
    )


def _resolved(schema: Mapping[str, Any], raw: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = raw.get("$ref", "")
    if not reference.startswith("#/$defs/"):
        return raw
    return schema.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {})
