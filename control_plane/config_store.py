"""ConfigStore: the revisions of the configuration, one file each, or in memory only where no folder is kept.

What a revision stores is a merge patch over the YAML file's configuration, so a restart applies it to whatever the file
says then. It does not know what a valid configuration is.
"""

import logging
import threading
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from control_plane.whole_files import sync_folder, write_whole
from runtime.engine.change import ChangeKind, FieldChange

KEPT_REVISIONS = 500
MAX_OVERRIDE_BYTES = 64 * 1024
_PREFIX, _SUFFIX = "revision-", ".json"
log = logging.getLogger(__name__)


class RevisionStatus(StrEnum):
    """What became of a revision."""

    APPLIED = "applied"
    COMPILING = "compiling"  # its live fields hold, its rungs do not yet
    CANARY = "canary"  # in force, on trial
    FAILED = "failed"  # its rungs could not be compiled; a later revision took it back
    REVERTED = "reverted"  # a later revision took it back


@dataclass(frozen=True, slots=True)
class Revision:
    """One version of the configuration.

    time_s: Unix seconds. overrides: merge patch over the file. changes: against the revision before.
    base: SHA-256 of the whole document then, by which a start sees that the file has changed.
    error: why it could not be kept, or what was wrong with what was stored.
    """

    number: int
    time_s: float
    actor: str
    reason: str
    status: RevisionStatus = RevisionStatus.APPLIED
    overrides: dict[str, Any] = field(default_factory=dict)
    changes: tuple[FieldChange, ...] = ()
    request_id: str = ""
    base: str = ""
    error: str = ""
    rolled_back_to: int | None = None
    canary: dict[str, Any] | None = None


class ConfigStore:
    """The last revisions, newest last. Any thread; every change is durable when its method returns.

    folder: None keeps them in memory. Raises OSError when the folder cannot be read or written.
    """

    def __init__(self, folder: Path | None, kept: int = KEPT_REVISIONS) -> None:
        self._folder, self._kept = folder, kept
        self._lock = threading.Lock()
        self.damaged: list[str] = []  # files that could not be read, set aside
        self._last_number = 0
        self._revisions: dict[int, Revision] = self._read() if folder is not None else {}

    @property
    def newest(self) -> Revision | None:
        with self._lock:
            return self._revisions[max(self._revisions)] if self._revisions else None

    @property
    def next_number(self) -> int:
        """Never given twice, not even when the newest file was damaged."""
        with self._lock:
            return self._last_number + 1

    def get(self, number: int) -> Revision | None:
        with self._lock:
            return self._revisions.get(number)

    def page(self, before: int | None, limit: int) -> list[Revision]:
        """Up to `limit` revisions with numbers below `before`, newest first."""
        with self._lock:
            numbers = sorted((n for n in self._revisions if before is None or n < before), reverse=True)
            return [self._revisions[n] for n in numbers[:limit]]

    def append(self, revision: Revision) -> None:
        """`revision.number` must be `next_number`. Raises OSError, and then nothing has changed."""
        with self._lock:
            assert revision.number == self._last_number + 1, "revisions come one after another"
            self._write(revision)
            self._revisions[revision.number] = revision
            self._last_number = revision.number
            for old in sorted(self._revisions)[: -self._kept]:
                del self._revisions[old]
                if self._folder is not None:
                    self._path(old).unlink(missing_ok=True)

    def update(self, number: int, status: RevisionStatus, **fields: Any) -> Revision | None:
        """Notes what became of a revision; None when it is not kept any more."""
        with self._lock:
            revision = self._revisions.get(number)
            if revision is None:
                return None
            revision = replace(revision, status=status, **fields)
            self._write(revision)
            self._revisions[number] = revision
            return revision

    def discard(self, number: int) -> None:
        """Takes back an `append` that nobody has seen: the engine refused it."""
        with self._lock:
            assert number == self._last_number, "only the newest can be taken back"
            if self._folder is not None:
                self._path(number).unlink(missing_ok=True)
                sync_folder(self._folder)
            del self._revisions[number]
            self._last_number = number - 1

    def _write(self, revision: Revision) -> None:
        if self._folder is not None:
            write_whole(self._path(revision.number), orjson.dumps(asdict(revision)))

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{_PREFIX}{number:09d}{_SUFFIX}"

    def _read(self) -> dict[int, Revision]:
        assert self._folder is not None
        found: dict[int, Revision] = {}
        for path in sorted(self._folder.glob(f"{_PREFIX}*{_SUFFIX}")):
            try:
                revision = _from_json(path.read_bytes())
                if path != self._path(revision.number):
                    raise ValueError(f"it holds revision {revision.number}")
                found[revision.number] = revision
            except (ValueError, KeyError, TypeError) as error:
                log.error("%s cannot be read and is set aside: %s", path, str(error)[:200])
                self.damaged.append(path.name)
                path.rename(path.with_suffix(".damaged"))
        named = [p.stem.removeprefix(_PREFIX) for p in self._folder.glob(f"{_PREFIX}*")]
        self._last_number = max((int(text) for text in named if text.isdigit()), default=0)
        return found


def _from_json(data: bytes) -> Revision:
    """Raises ValueError, KeyError, TypeError when it is no revision."""
    found = orjson.loads(data)
    changes = [FieldChange(c["path"], ChangeKind(c["kind"]), c["old"], c["new"]) for c in found["changes"]]
    revision = Revision(**found | {"status": RevisionStatus(found["status"]), "changes": tuple(changes)})
    if not isinstance(revision.number, int) or not isinstance(revision.overrides, dict):
        raise ValueError("number or overrides of a wrong type")
    return revision
