"""Files whole or not at all; one server a folder."""

import os
from pathlib import Path

import pytest

from control_plane.whole_files import FolderLocked, LockedFolder, write_whole


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    first = LockedFolder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
    with pytest.raises(FolderLocked, match="in use"):
        LockedFolder(tmp_path / "a" / "b")
    first.close()
    first.close()
    LockedFolder(tmp_path / "a" / "b").close()


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_whole(path, b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.json"]


def test_what_a_crash_left_beside_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "x.json.tmp").write_bytes(b"half")
    LockedFolder(tmp_path).close()
    assert not (tmp_path / "x.json.tmp").exists()
