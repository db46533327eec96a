"""Peak memory of a process and its children as proportional set size, so that shared pages count once.

Sampled every two seconds and at the end: reading the page tables more often stalls the threads being measured.
"""

import os
import threading
from pathlib import Path
from types import TracebackType

PERIOD_S = 2.0


class PeakMemory:
    """A context: on leaving it, `peak_bytes` holds the largest sample. Linux only; 0 elsewhere."""

    def __init__(self, pid: int | None = None, period_s: float = PERIOD_S) -> None:
        self.pid = pid or os.getpid()
        self.peak_bytes = 0
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self._period_s):
            self._sample()

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(_pss_bytes(pid) for pid in process_tree(self.pid)))


def process_tree(pid: int) -> list[int]:
    """The process and everything it started that still lives."""
    found, todo = [], [pid]
    while todo:
        current = todo.pop()
        found.append(current)
        for children in Path(f"/proc/{current}/task").glob("*/children"):
            try:
                todo += [int(child) for child in children.read_text().split()]
            except OSError:  # the thread ended between the listing and the reading
                continue
    return found


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
