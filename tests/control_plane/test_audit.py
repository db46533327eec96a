"""The audit: chained, durable, bounded; edits are found, torn ends are repaired."""

import os
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.audit import REFUSED_PER_MINUTE, AuditLog


def lines(folder: Path) -> list[bytes]:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("audit-*"))).splitlines()


@pytest.mark.parametrize("is_kept", [True, False])
def test_entries_come_back_newest_first(tmp_path: Path, is_kept: bool) -> None:
    audit = AuditLog(tmp_path if is_kept else None, clock=lambda: 1_700_000_000.25)
    for i in range(5):
        assert audit.append("change", actor="a", revision=i, note="ü") == i + 1
    assert [e["revision"] for e in audit.page(None, 2)] == [4, 3]
    assert [e["revision"] for e in audit.page(3, 10)] == [1, 0]
    assert audit.page(None, 1)[0]["time"] == "2023-11-14T22:13:20.250Z"
    check = audit.verify()
    assert (check.is_ok, check.first, check.last) == (True, 1, 5)
    assert audit.verify() == check


def test_an_empty_log_verifies(tmp_path: Path) -> None:
    assert AuditLog(tmp_path).verify().is_ok
    assert AuditLog(None).verify().is_ok


def test_the_chain_goes_on_after_a_restart_and_across_files(tmp_path: Path) -> None:
    for _ in range(3):
        audit = AuditLog(tmp_path, max_file_bytes=1000, kept_files=100)
        for _ in range(7):
            audit.append("change", revision=1)
    assert len(list(tmp_path.iterdir())) > 3
    assert audit.verify().is_ok
    assert [e["number"] for e in audit.page(None, 100)] == list(range(21, 0, -1))


def test_old_files_go_and_the_rest_still_verifies(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path, max_file_bytes=1000, kept_files=2)
    for _ in range(40):
        audit.append("change")
    check = AuditLog(tmp_path).verify()
    assert len(list(tmp_path.iterdir())) == 2
    assert check.is_ok
    assert check.first > 1
    assert check.last == 40


def tamper(text: list[bytes], kind: str, at: int) -> list[bytes]:
    if kind == "edited":
        entry = orjson.loads(text[at]) | {"actor": "mallory"}
        return [*text[:at], orjson.dumps(entry), *text[at + 1 :]]
    if kind == "removed":
        return [*text[:at], *text[at + 1 :]]
    if kind == "swapped":
        return [*text[:at], text[at + 1], text[at], *text[at + 2 :]]
    return [*text[:at], b"garbage", *text[at:]]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["edited", "removed", "swapped", "put in"]), st.integers(1, 7))
def test_tampering_is_found(tmp_path_factory: pytest.TempPathFactory, kind: str, at: int) -> None:
    folder = tmp_path_factory.mktemp("audit")
    audit = AuditLog(folder)
    for i in range(10):
        audit.append("change", actor="a", revision=i)
    path = next(folder.iterdir())
    path.write_bytes(b"\n".join(tamper(lines(folder), kind, at)) + b"\n")
    check = audit.verify()
    assert not check.is_ok
    assert "number" in check.problem


def test_a_removed_end_is_found_while_the_server_runs(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path)
    for _ in range(3):
        audit.append("change")
    path = next(tmp_path.iterdir())
    path.write_bytes(b"\n".join(lines(tmp_path)[:2]) + b"\n")
    assert "ends at number 2" in audit.verify().problem


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 200), st.integers(1, 3))
def test_a_torn_end_is_repaired(tmp_path_factory: pytest.TempPathFactory, num_cut: int, num: int) -> None:
    folder = tmp_path_factory.mktemp("audit")
    audit = AuditLog(folder)
    for i in range(num):
        audit.append("change", revision=i, note="x" * 200)
    path = next(folder.iterdir())
    data = path.read_bytes()
    path.write_bytes(data[:-num_cut])
    again = AuditLog(folder)
    assert again.verify().is_ok
    entry = again.page(None, 1)[0]
    last_line = len(data.splitlines()[-1]) + 1
    assert (entry["event"], entry["number"]) == ("repaired", num)
    assert f"{last_line - num_cut} bytes" in entry["detail"] or last_line == num_cut


def test_a_line_that_cannot_be_written_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = AuditLog(tmp_path)
    audit.append("change")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            audit.append("change")
    assert len(lines(tmp_path)) == 1
    audit.append("change")
    assert audit.verify().is_ok


def test_refused_tries_cannot_fill_the_disk(tmp_path: Path) -> None:
    now = 600.0
    audit = AuditLog(tmp_path, clock=lambda: now)
    for _ in range(1000):
        audit.append_refused("change", result="412 stale_revision")
        audit.count_refused("401")
    assert len(lines(tmp_path)) == REFUSED_PER_MINUTE
    audit.flush_refused()
    audit.flush_refused()
    counts = {"401": 1000, "412 stale_revision": 1000 - REFUSED_PER_MINUTE}
    assert audit.page(None, 1)[0]["counts"] == counts
    assert len(lines(tmp_path)) == REFUSED_PER_MINUTE + 1
    now = 661.0
    audit.append_refused("change", result="412 stale_revision")
    assert len(lines(tmp_path)) == REFUSED_PER_MINUTE + 2
