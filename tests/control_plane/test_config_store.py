"""The store: what is appended is what is read, numbers never come twice, damage is set aside."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane import config_store
from control_plane.config_store import ConfigStore, Revision, RevisionStatus
from runtime.engine.change import ChangeKind, FieldChange

values = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
)
overrides = st.dictionaries(
    st.text(max_size=5), values | st.text(max_size=5) | st.lists(values, max_size=3), max_size=3
)
changes = st.builds(FieldChange, st.text(max_size=5), st.sampled_from(ChangeKind), values, values)


def revision(number: int, **fields: object) -> Revision:
    return Revision(**{"number": number, "time_s": 1.5, "actor": "a", "reason": "r"} | fields)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(overrides, st.lists(changes, max_size=2), st.text(max_size=9)), min_size=1, max_size=4)
)
def test_what_is_stored_is_read_back(found: list) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = ConfigStore(Path(name))
        for i, (values, fields, reason) in enumerate(found, 1):
            store.append(revision(i, overrides=values, changes=tuple(fields), reason=reason))
        store.update(1, RevisionStatus.FAILED, error="no memory")
        again = ConfigStore(Path(name))
        assert again.page(None, 10) == store.page(None, 10)
        assert again.get(1).error == "no memory"
        assert again.next_number == len(found) + 1


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    for store in (ConfigStore(tmp_path, kept=3), ConfigStore(None, kept=3)):
        for i in range(1, 6):
            store.append(revision(i))
        assert [r.number for r in store.page(None, 10)] == [5, 4, 3]
        assert [r.number for r in store.page(5, 1)] == [4]
        assert store.update(1, RevisionStatus.APPLIED) is None
    assert len(list(tmp_path.iterdir())) == 3


def test_a_discarded_revision_was_never_there(tmp_path: Path) -> None:
    store = ConfigStore(tmp_path)
    store.append(revision(1))
    store.append(revision(2, reason="refused"))
    store.discard(2)
    store.append(revision(2, reason="taken"))
    assert ConfigStore(tmp_path).get(2).reason == "taken"


def test_a_write_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ConfigStore(tmp_path)
    store.append(revision(1))

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(config_store, "write_whole", full)
        with pytest.raises(OSError, match="No space"):
            store.append(revision(2))
        with pytest.raises(OSError, match="No space"):
            store.update(1, RevisionStatus.FAILED)
    assert (store.next_number, store.newest.status) == (2, RevisionStatus.APPLIED)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"number": 3}', b"\xff"])
def test_damage_is_set_aside_and_its_number_not_given_again(tmp_path: Path, text: bytes) -> None:
    store = ConfigStore(tmp_path)
    for i in range(1, 4):
        store.append(revision(i))
    (tmp_path / "revision-000000003.json").write_bytes(text)
    again = ConfigStore(tmp_path)
    assert again.damaged == ["revision-000000003.json"]
    assert (again.newest.number, again.next_number) == (2, 4)
    assert ConfigStore(tmp_path).next_number == 4
