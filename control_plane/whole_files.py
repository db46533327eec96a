"""Files that are there whole or not at all, whenever the process ends; and the folder that one server owns."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".tmp"


class FolderLocked(Exception):
    """Another process holds the folder."""


class LockedFolder:
    """A private folder, made if it is not there. Held by an flock, which the kernel drops when the process ends."""

    def __init__(self, path: Path) -> None:
        """Raises FolderLocked, OSError."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            raise FolderLocked(
                f"{path} is in use by another server; end it, or give this one a server.state_dir or port of its own"
            ) from None
        for left_over in path.glob(f"*{TEMPORARY}"):
            left_over.unlink()

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def write_whole(path: Path, data: bytes) -> None:
    """Writes beside `path`, then renames: a reader, or a start after a crash, finds the old content or the new.

    Durable when it returns. Raises OSError, and then the old content is what is there.
    """
    beside = path.with_name(path.name + TEMPORARY)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes renames, new names and removals in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
