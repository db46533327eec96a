"""Drafts: small patches, and nobody's change is overwritten by silence."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from control_plane.merge_patch import leaves, merge, nested
from ui.draft import Choice, Draft, ThreeWay

BASE = {"a": {"x": 1, "y": "500ms"}, "b": {"z": [1, 2], "on": True}}
DEFAULTS = {"a.x": 7, "a.y": "1s", "b.z": [], "b.on": False}
PATHS = list(DEFAULTS)


def test_a_draft_holds_only_what_was_touched() -> None:
    draft = Draft.on(3, BASE).with_value("a.x", 2).with_value("b.on", True).with_default("b.z")
    assert draft.patch == {"a": {"x": 2}, "b": {"z": None}}
    assert draft.paths == ["a.x", "b.z"]
    assert draft.value("b.z", DEFAULTS) == []
    assert draft.with_value("a.x", 1).without("b.z").is_empty


def test_true_is_not_one() -> None:
    assert Draft.on(1, {"a": {"x": 1}}).with_value("a.x", True).patch == {"a": {"x": True}}


def test_three_ways() -> None:
    draft = Draft.on(3, BASE).with_value("a.x", 2).with_value("a.y", "300ms")
    theirs = {"a": {"x": 5, "y": "500ms"}, "b": {"z": [1], "on": True}}
    found = draft.compare(theirs, DEFAULTS)
    assert found == [
        ThreeWay("a.x", 1, 5, 2),
        ThreeWay("a.y", "500ms", "500ms", "300ms"),
        ThreeWay("b.z", [1, 2], [1], [1, 2]),
    ]
    assert [way.path for way in found if way.is_conflict and way.path in draft.paths] == ["a.x"]
    silent = draft.rebased(4, theirs, {})
    assert (silent.revision, silent.patch) == (4, {"a": {"y": "300ms"}})
    assert draft.rebased(4, theirs, {"a.x": Choice.YOURS}).patch == {"a": {"x": 2, "y": "300ms"}}


@given(st.data())
def test_rebasing_never_takes_back_what_nobody_chose(data: Any) -> None:
    """Whatever both did: fields that the author did not touch, or gave up, stay as they are now."""
    value = st.sampled_from([0, 1, 2, "1s", True, [1]])
    yours = data.draw(st.dictionaries(st.sampled_from(PATHS), value))
    theirs_changes = data.draw(st.dictionaries(st.sampled_from(PATHS), value))
    choices = data.draw(st.dictionaries(st.sampled_from(PATHS), st.sampled_from(Choice)))
    draft = Draft.on(1, BASE)
    for path, new in yours.items():
        draft = draft.with_value(path, new)
    theirs = merge(BASE, nested(theirs_changes.items()))
    rebased = draft.rebased(2, theirs, choices)
    after = dict(leaves(merge(theirs, rebased.patch)))
    now, base = dict(leaves(theirs)), dict(leaves(BASE))
    for path in PATHS:
        both_changed = repr(now[path]) != repr(base[path])
        is_given_up = choices.get(path) is Choice.THEIRS or (path not in choices and both_changed)
        if path not in draft.paths or is_given_up:
            assert repr(after[path]) == repr(now[path])
        else:
            assert repr(after[path]) == repr(yours[path])
