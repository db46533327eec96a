"""AuditLog: who changed what and why, one JSON line each, every line chained to the one before by SHA-256.

The chain shows that a line was edited, removed or put in. It cannot show that somebody with access to the folder wrote
all of it anew: keep the head that `verify` returns elsewhere if that matters. Values come redacted to this class.
"""

import hashlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from control_plane.whole_files import sync_folder

GENESIS = "0" * 64
MAX_FILE_BYTES = 4 << 20
KEPT_FILES = 8
KEPT_IN_MEMORY = 1000
REFUSED_PER_MINUTE = (
    30  # lines; what comes above is counted only, so that nobody can fill the disk with tries
)
_PREFIX, _SUFFIX = "audit-", ".jsonl"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """What a walk along the chain found. `first` above 1: the lines before were rotated away."""

    is_ok: bool
    first: int
    last: int
    head: str
    problem: str = ""


class AuditLog:
    """Append-only. Any thread; a line is durable when `append` returns.

    folder: None keeps the last lines in memory. clock: Unix seconds.
    """

    def __init__(
        self,
        folder: Path | None,
        clock: Callable[[], float] = time.time,
        max_file_bytes: int = MAX_FILE_BYTES,
        kept_files: int = KEPT_FILES,
    ) -> None:
        self._folder, self._clock = folder, clock
        self._max_file_bytes, self._kept_files = max_file_bytes, kept_files
        self._memory: deque[bytes] = deque(maxlen=KEPT_IN_MEMORY)
        self._lock = threading.Lock()
        self._number, self._head = 0, GENESIS
        self._refused: Counter[str] = Counter()
        self._num_refused_lines, self._minute = 0, 0
        self.last_revision = 0  # the highest revision that a line of the newest file speaks of
        if folder is not None and (num_cut := self._recover()):
            log.warning("the audit's last line was torn by a crash: %d bytes cut off", num_cut)
            self.append("repaired", detail=f"{num_cut} bytes of a torn last line were cut off")

    def append(self, event: str, **facts: Any) -> int:
        """Adds a line and returns its number. Raises OSError, and then the log is as it was."""
        with self._lock:
            return self._append(event, facts)

    def append_refused(self, event: str, **facts: Any) -> None:
        """A try that was refused: a line for the first of a minute, a count for the rest."""
        with self._lock:
            minute = int(self._clock() // 60)
            if minute != self._minute:
                self._minute, self._num_refused_lines = minute, 0
            self._num_refused_lines += 1
            if self._num_refused_lines <= REFUSED_PER_MINUTE:
                self._append(event, facts)
            else:
                self._refused[str(facts.get("result", event))] += 1

    def count_refused(self, what: str) -> None:
        """A try by somebody without a fitting key: counted, written as a sum by `flush_refused`."""
        with self._lock:
            self._refused[what] += 1

    def flush_refused(self) -> None:
        """One line with the counts since the last, if there are any."""
        with self._lock:
            if self._refused:
                counts = dict(sorted(self._refused.items()))
                self._append("refused", {"counts": counts})
                self._refused.clear()

    def page(self, before: int | None, limit: int) -> list[dict[str, Any]]:
        """Up to `limit` entries with numbers below `before`, newest first."""
        found: list[dict[str, Any]] = []
        for line in self._backwards():
            entry = _parsed(line)
            if entry is not None and (before is None or entry["number"] < before):
                found.append(entry)
                if len(found) == limit:
                    break
        return found

    def verify(self) -> AuditCheck:
        """Walks the chain as it is now, from the oldest kept line."""
        with self._lock:
            last, head = self._number, self._head
            files = [self._memory_lines()] if self._folder is None else [_lines(p) for p in self._files()]
        first, previous, number = 0, "", 0
        for line in (line for lines in files for line in lines):
            entry = _parsed(line)
            if entry is None:
                return AuditCheck(False, first, last, head, f"the line after number {number} is no entry")
            if not first:
                first = entry["number"]
                previous, number = (GENESIS, 0) if first == 1 else (entry["previous"], first - 1)
            if entry["number"] != number + 1:
                text = f"number {entry['number']} follows number {number}"
                return AuditCheck(False, first, last, head, text)
            if entry["previous"] != previous or entry["hash"] != _digest(entry):
                return AuditCheck(
                    False, first, last, head, f"number {entry['number']} does not fit the chain"
                )
            previous, number = entry["hash"], entry["number"]
            if number == last:
                break
        if (number, previous or GENESIS) != (last, head):
            return AuditCheck(False, first, last, head, f"the chain ends at number {number}, not {last}")
        return AuditCheck(True, first, last, head)

    def _append(self, event: str, facts: dict[str, Any]) -> int:
        entry = {"number": self._number + 1, "time": _iso(self._clock()), "event": event, **facts}
        entry["previous"] = self._head
        entry["hash"] = _digest(entry)
        line = orjson.dumps(entry) + b"\n"
        if self._folder is None:
            self._memory.append(line)
        else:
            self._write(line)
        self._number, self._head = entry["number"], entry["hash"]
        self.last_revision = max(self.last_revision, _revision(entry))
        return self._number

    def _write(self, line: bytes) -> None:
        files = self._files()
        is_new = not files or files[-1].stat().st_size + len(line) > self._max_file_bytes
        path = self._new_path() if is_new else files[-1]
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            try:
                if os.write(fd, line) != len(line):
                    raise OSError("no room for the whole line")
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
        if is_new:
            sync_folder(path.parent)
            for old in self._files()[: -self._kept_files]:
                old.unlink()

    def _recover(self) -> int:
        """Cuts off a torn last line and finds the end of the chain. Returns the bytes cut."""
        num_cut = 0
        for path in reversed(self._files()):
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            while whole and _parsed(whole.rstrip(b"\n").rpartition(b"\n")[2]) is None:
                whole = whole[: whole.rstrip(b"\n").rfind(b"\n") + 1]
            if len(whole) != len(data):
                num_cut += len(data) - len(whole)
                with path.open("r+b") as file:
                    file.truncate(len(whole))
                    os.fsync(file.fileno())
            if whole:
                entries = [entry for line in whole.splitlines() if (entry := _parsed(line)) is not None]
                self._number, self._head = entries[-1]["number"], entries[-1]["hash"]
                self.last_revision = max(map(_revision, entries))
                break
        return num_cut

    def _files(self) -> list[Path]:
        assert self._folder is not None
        return sorted(self._folder.glob(f"{_PREFIX}*{_SUFFIX}"))

    def _new_path(self) -> Path:
        assert self._folder is not None
        return self._folder / f"{_PREFIX}{self._number + 1:012d}{_SUFFIX}"

    def _memory_lines(self) -> list[bytes]:
        return list(self._memory)

    def _backwards(self) -> Iterator[bytes]:
        if self._folder is None:
            with self._lock:
                lines = self._memory_lines()
            yield from reversed(lines)
            return
        for path in reversed(self._files()):
            yield from reversed(_lines(path))


def _lines(path: Path) -> list[bytes]:
    """The whole lines of a file; none when it was rotated away meanwhile."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    is_entry = isinstance(entry, dict) and {"number", "previous", "hash"} <= entry.keys()
    return entry if is_entry and isinstance(entry["number"], int) else None


def _digest(entry: dict[str, Any]) -> str:
    """SHA-256 over the hash before and the entry itself in canonical JSON (sorted keys, no spaces)."""
    body = {key: value for key, value in entry.items() if key != "hash"}
    return hashlib.sha256(
        str(entry["previous"]).encode() + orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    ).hexdigest()


def _revision(entry: dict[str, Any]) -> int:
    found = entry.get("revision")
    return found if isinstance(found, int) else 0


def _iso(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time_s)) + f".{int(time_s % 1 * 1000):03d}Z"
