"""RFC 7396: the RFC's own table, and what diff and merge promise each other."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.merge_patch import MAX_DEPTH, diff, is_too_deep, leaves, merge, nested, same

names = st.text("abc", min_size=1, max_size=2)
values = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("xy", max_size=2) | st.lists(st.integers(0, 2))
)
documents = st.dictionaries(
    names, st.recursive(values, lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=8)
)
whole = st.recursive(
    values.filter(lambda v: v is not None),
    lambda inner: st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_the_rfcs_table(target: Any, patch: Any, result: Any) -> None:
    assert merge(target, patch) == result


@given(documents, documents)
def test_merge_twice_is_merge_once_and_changes_nothing_else(target: dict, patch: dict) -> None:
    before = copy.deepcopy((target, patch))
    once = merge(target, patch)
    assert merge(once, patch) == once
    assert (target, patch) == before


@given(st.dictionaries(names, whole, max_size=4), st.dictionaries(names, whole, max_size=4))
def test_diff_leads_from_one_to_the_other(old: dict, new: dict) -> None:
    patch = diff(old, new)
    assert same(merge(old, patch), new)
    assert diff(new, new) == {}
    assert same(old, new) is (patch == {})


def test_true_is_not_one() -> None:
    assert diff({"a": 1, "b": [0]}, {"a": True, "b": [False]}) == {"a": True, "b": [False]}


def test_leaves_and_nested_are_each_others_inverse() -> None:
    document = {"a": {"b": 1, "c": [2]}, "d": "x"}
    assert list(leaves(document)) == [("a.b", 1), ("a.c", [2]), ("d", "x")]
    assert nested(leaves(document)) == document


def test_depth_is_found_without_recursion() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = {"a": deep}
    assert is_too_deep(deep)
    fine: Any = 1
    for _ in range(MAX_DEPTH):
        fine = [fine]
    assert not is_too_deep(fine)
    assert is_too_deep([fine])
    while isinstance(deep, dict):  # taken apart by hand: freeing it recursively is what it would test next
        deep = deep.pop("a")
