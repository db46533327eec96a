"""Draft: what an operator wants to change, against the revision that it was written for; and the way on after a conflict.

Pure: values in, values out. A draft never holds the whole configuration, only the fields that its author touched, so it
cannot take back what somebody else did to other fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from control_plane.merge_patch import leaves, nested, same


class Choice(StrEnum):
    """Whose value goes on after a conflict."""

    YOURS = "yours"
    THEIRS = "theirs"


@dataclass(frozen=True, slots=True)
class ThreeWay:
    """One field in a conflict: at the revision the draft was written for, now, and in the draft."""

    path: str
    base: Any
    theirs: Any
    yours: Any

    @property
    def is_conflict(self) -> bool:
        """Both changed it, to different values. Otherwise the draft can be carried over as it is."""
        return not same(self.base, self.theirs) and not same(self.theirs, self.yours)


@dataclass(frozen=True, slots=True)
class Draft:
    """revision and base: what the author saw (leaves by dotted path). values: the fields that are to change.

    to_default: fields that are to have their default back.
    """

    revision: int
    base: Mapping[str, Any]
    values: Mapping[str, Any] = field(default_factory=dict)
    to_default: frozenset[str] = frozenset()

    @classmethod
    def on(cls, revision: int, stored: dict[str, Any]) -> Self:
        return cls(revision, dict(leaves(stored)))

    @property
    def is_empty(self) -> bool:
        return not self.values and not self.to_default

    @property
    def paths(self) -> list[str]:
        return [path for path in self.base if path in self.values or path in self.to_default]

    @property
    def patch(self) -> dict[str, Any]:
        """RFC 7396: null gives a field its default back."""
        touched = dict(self.values) | dict.fromkeys(self.to_default)
        return nested((path, touched[path]) for path in self.base if path in touched)

    def with_value(self, path: str, value: Any) -> "Draft":
        """A value as it was before is no change. Raises KeyError for a field that the server does not have."""
        values = {p: v for p, v in self.values.items() if p != path}
        if not same(self.base[path], value):
            values[path] = value
        return replace(self, values=values, to_default=self.to_default - {path})

    def with_default(self, path: str) -> "Draft":
        values = {p: v for p, v in self.values.items() if p != path}
        return replace(self, values=values, to_default=self.to_default | {path})

    def without(self, path: str) -> "Draft":
        values = {p: v for p, v in self.values.items() if p != path}
        return replace(self, values=values, to_default=self.to_default - {path})

    def value(self, path: str, defaults: Mapping[str, Any]) -> Any:
        """What the field would be."""
        if path in self.to_default:
            return defaults.get(path)
        return self.values.get(path, self.base.get(path))

    def compare(self, stored: dict[str, Any], defaults: Mapping[str, Any]) -> list[ThreeWay]:
        """Every field that the draft or somebody else touched since, in the configuration's order."""
        theirs = dict(leaves(stored))
        return [
            ThreeWay(path, self.base.get(path), now, self.value(path, defaults))
            for path, now in theirs.items()
            if path in self.values or path in self.to_default or not same(self.base.get(path), now)
        ]

    def rebased(self, revision: int, stored: dict[str, Any], choices: Mapping[str, Choice]) -> "Draft":
        """The draft on a newer revision. Fields where `choices` says theirs are given up; the rest stays the author's.

        What nobody chose and both changed is given up too: a value is never overwritten by silence.
        """
        theirs = dict(leaves(stored))
        draft = Draft(revision, theirs)
        for path in self.paths:
            if path not in theirs:
                continue
            is_untouched = same(self.base.get(path), theirs[path])
            if choices.get(path, Choice.YOURS if is_untouched else Choice.THEIRS) is Choice.THEIRS:
                continue
            if path in self.to_default:
                draft = draft.with_default(path)
            else:
                draft = draft.with_value(path, self.values[path])
        return draft
