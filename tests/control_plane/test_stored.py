"""Kept completions are bounded in number and bytes."""

import pytest

from control_plane.errors import NotFound
from control_plane.stored import StoredCompletions


def add(store: StoredCompletions, name: str, text: str = "") -> None:
    store.add({"id": name, "model": "m", "text": text}, key_id="k", name=None, metadata={})


def test_oldest_goes_first() -> None:
    store = StoredCompletions(max_count=2)
    for name in "abc":
        add(store, name)
    page = store.list("k", after=None, limit=5, descending=True, model=None, metadata={})
    assert [item["id"] for item in page["data"]] == ["c", "b"]
    with pytest.raises(NotFound):
        store.get("a", "k")


def test_bytes_are_bounded() -> None:
    store = StoredCompletions(max_bytes=500)
    add(store, "a", "x" * 300)
    add(store, "b", "x" * 300)
    add(store, "c", "x" * 900)
    page = store.list("k", after=None, limit=5, descending=False, model=None, metadata={})
    assert [item["id"] for item in page["data"]] == ["b"]


def test_pages() -> None:
    store = StoredCompletions()
    for name in "abcd":
        add(store, name)
    page = store.list("k", after="a", limit=2, descending=False, model="m", metadata={})
    assert ([item["id"] for item in page["data"]], page["last_id"], page["has_more"]) == (
        ["b", "c"],
        "c",
        True,
    )
