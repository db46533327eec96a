"""RFC 7396 merge patches over plain JSON documents: apply one, find one, walk the leaves. Knows no configuration."""

from collections.abc import Iterable, Iterator
from typing import Any

MAX_DEPTH = 8  # a configuration has two levels; deeper input is a mistake or an attack on the recursion below


def merge(target: Any, patch: Any) -> Any:
    """`target` with `patch` applied (RFC 7396, section 2): null removes a key, an object goes deeper, the rest replaces.

    Neither argument is changed.
    """
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def diff(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The smallest patch with `merge(old, patch) == new`. `new` holds no null, which a patch cannot express."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            if inner := diff(before, value):
                patch[key] = inner
        elif key not in old or not same(before, value):
            patch[key] = value
    return patch


def same(one: Any, other: Any) -> bool:
    """Equality as JSON sees it: true is not 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def leaves(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything that is not an object, in the document's order."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The document whose leaves are `values`, given as (dotted path, value)."""
    document: dict[str, Any] = {}
    for path, value in values:
        *parents, name = path.split(".")
        inner = document
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return document


def is_too_deep(value: Any) -> bool:
    """Whether objects and lists are nested more than MAX_DEPTH levels; without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
