"""What a server starts with: stored changes over the file, files that changed, ends in the middle of something."""

from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.config_document import document
from control_plane.config_state import ConfigState, fingerprint, in_memory, open_state, state_folder
from control_plane.config_store import Revision, RevisionStatus
from control_plane.merge_patch import diff, merge
from control_plane.whole_files import FolderLocked
from runtime.config import EngineConfig, parse_config
from runtime.engine.reconfigure import diff_fields


def file(folder: Path | str, **sections: dict) -> EngineConfig:
    return parse_config({"server": {"state_dir": str(folder)}} | sections)


def store(state: ConfigState, patch: dict, status: RevisionStatus = RevisionStatus.APPLIED) -> Revision:
    """What a change leaves in the store."""
    before = state.store.newest
    old = parse_config(merge(document(state.file), before.overrides))
    new = parse_config(merge(document(old), patch))
    revision = Revision(
        number=state.store.next_number,
        time_s=1.0,
        actor="ab12",
        reason="test",
        status=status,
        overrides=diff(document(state.file), document(new)),
        changes=diff_fields(old, new),
        base=fingerprint(document(new)),
    )
    state.store.append(revision)
    state.audit.append("change", revision=revision.number)
    return revision


def test_where_it_is_kept() -> None:
    assert state_folder(parse_config({"server": {"port": 0}})) is None
    assert state_folder(file("off")) is None
    assert state_folder(file("/x/y")) == Path("/x/y")
    assert state_folder(EngineConfig()) == Path.home() / ".local/state/moe-ladder/8000"


def test_a_fresh_folder_has_one_revision(tmp_path: Path) -> None:
    state = open_state(file(tmp_path / "s"))
    assert (state.config, state.store.newest.number) == (state.file, 1)
    with pytest.raises(FolderLocked):
        open_state(file(tmp_path / "s"))
    state.close()
    open_state(file(tmp_path / "s")).close()
    assert state.store.next_number == 2


def test_changes_survive_and_lie_over_a_file_that_changed(tmp_path: Path) -> None:
    state = open_state(file(tmp_path))
    store(state, {"slo": {"itl": "70ms"}, "ladder": {"max_prefill_tokens": 256}})
    state.close()
    again = open_state(file(tmp_path))
    assert (again.config.slo.itl, again.config.ladder.max_prefill_tokens) == (0.07, 256)
    assert again.store.newest.number == 2
    again.close()
    changed = open_state(file(tmp_path, slo={"ttft": "9s"}))
    assert (changed.config.slo.itl, changed.config.slo.ttft) == (0.07, 9.0)
    newest = changed.store.newest
    assert (newest.number, newest.actor, newest.reason) == (
        3,
        "server",
        "the file, or what a version makes of it, has changed",
    )
    assert changed.audit.page(None, 1)[0]["revision"] == 3
    changed.close()


def test_changes_that_do_not_fit_a_changed_file_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = open_state(file(tmp_path))
    kept = store(state, {"batch_processing": {"max_batch_size": 64}})
    state.close()
    small = file(tmp_path, ladder={"row_slots": 16}, batch_processing={"max_batch_size": 16})
    again = open_state(small)
    assert again.config == small
    newest = again.store.newest
    assert "row_slots" in newest.error
    assert newest.number == kept.number + 1
    assert again.store.get(kept.number).overrides == kept.overrides
    assert "do not fit" in caplog.text
    assert "row_slots" in again.audit.page(None, 1)[0]["reason"]
    again.close()
    third = open_state(small)
    assert "row_slots" in third.store.newest.error  # still told at the next start
    third.close()


@pytest.mark.parametrize("status", [RevisionStatus.COMPILING, RevisionStatus.CANARY])
def test_what_was_not_proven_is_undone(tmp_path: Path, status: RevisionStatus) -> None:
    """A rung that kills the server while it compiles must not be in the way of the next start."""
    state = open_state(file(tmp_path))
    store(state, {"slo": {"ttft": "1s"}})
    store(state, {"slo": {"itl": "70ms"}, "batch_processing": {"max_batch_size": 64}}, status)
    state.close()
    again = open_state(file(tmp_path))
    assert (again.config.slo.ttft, again.config.slo.itl) == (1.0, 0.1)
    assert again.config.batch_processing.max_batch_size == 32
    assert again.store.get(3).status is RevisionStatus.REVERTED
    assert (again.store.newest.number, "revision 3" in again.store.newest.reason) == (4, True)
    assert {c.path for c in again.store.newest.changes} == {"slo.itl", "batch_processing.max_batch_size"}
    again.close()


def test_a_revision_without_its_audit_line_is_written_down(tmp_path: Path) -> None:
    state = open_state(file(tmp_path))
    revision = store(state, {"slo": {"ttft": "1s"}})
    state.store.append(replace(revision, number=3))
    state.close()
    again = open_state(file(tmp_path))
    entry = again.audit.page(None, 1)[0]
    assert (entry["event"], entry["revision"]) == ("recovered", 3)
    again.close()


def test_a_key_cannot_be_smuggled_into_the_store(tmp_path: Path) -> None:
    state = open_state(file(tmp_path))
    store(state, {"server": {"admin_keys": ["f" * 64]}})
    state.close()
    again = open_state(file(tmp_path))
    assert again.config.server.admin_keys == ()
    assert "admin_keys" in again.store.newest.error
    again.close()


def test_damage_is_told(tmp_path: Path) -> None:
    state = open_state(file(tmp_path))
    store(state, {"slo": {"ttft": "1s"}})
    state.close()
    (tmp_path / "revision-000000002.json").write_bytes(b"")
    again = open_state(file(tmp_path))
    assert again.config.slo.ttft == 2.0
    assert any(entry["event"] == "damaged" for entry in again.audit.page(None, 9))
    again.close()


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").write_text("")
    with pytest.raises(OSError, match="plain"):
        open_state(file(tmp_path / "plain" / "x"))
    monkeypatch.setenv("HOME", str(tmp_path / "plain"))
    state = open_state(EngineConfig())  # the default folder is a convenience, not a condition
    assert state.folder is None
    assert in_memory(EngineConfig()).store.newest.number == state.store.newest.number == 1
