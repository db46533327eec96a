"""Processes that compile side by side. One that dies or takes too long costs its own task, not the others.

A compiler can do both: a layout search that does not end, an assertion in C++ that ends the process.
"""

import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from pallas_kernels.aot_compile import Outcome, Task, compile_task

_TAIL = 400  # characters of a dead worker's output that are shown
_MOST_WAITING = 4  # times the processor time that a task may take
_HARMLESS = ("nvdisasm invocation failed", "Source Location Trace", "mosaic/gpu/dump.cc")


def compile_in_processes(
    tasks: Sequence[Task], num_workers: int, timeout_s: float
) -> Iterator[tuple[Task, Outcome]]:
    """Each task with its outcome, as they end. timeout_s: processor time for one task, which a busy machine does not
    stretch; of waiting, four times as much is allowed.

    The compiler's own output is dropped: it says "nvdisasm invocation failed" of every kernel, which is harmless.
    """
    waiting = deque(tasks)
    with tempfile.TemporaryDirectory(prefix="aot-logs-") as folder:
        workers: list[_Worker] = []
        try:
            while waiting or any(worker.task for worker in workers):
                workers = [worker for worker in workers if worker.is_alive]
                while waiting and len(workers) < num_workers:
                    workers.append(_Worker(Path(folder)))
                for worker in workers:
                    if worker.task is None and waiting:
                        worker.give(waiting.popleft())
                wait([worker.connection for worker in workers if worker.task], timeout=0.5)
                for worker in workers:
                    ended = worker.take(timeout_s)
                    if ended is not None:
                        yield ended
        finally:
            for worker in workers:
                worker.stop()


class _Worker:
    """One process, with the task that it works on."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")  # JAX must not be forked
        self.connection, theirs = context.Pipe()
        self._log = folder / f"{time.monotonic_ns()}.log"
        self._process = context.Process(target=_work, args=(theirs, str(self._log)), daemon=True)
        self._process.start()
        theirs.close()
        self.task: Task | None = None
        self.is_alive = True
        self._since_s = self._cpu_since_s = 0.0

    def give(self, task: Task) -> None:
        self.task, self._since_s, self._cpu_since_s = task, time.monotonic(), self._cpu_s()
        self.connection.send(task)

    def take(self, timeout_s: float) -> tuple[Task, Outcome] | None:
        """The task that has ended, in whatever way; None while it runs."""
        task = self.task
        if task is None:
            return None
        try:
            if self.connection.poll():
                outcome = self.connection.recv()
                self.task = None
                return task, outcome
        except EOFError:
            why = f"the compiler ended its process: ...{self._output()}"
        else:
            waited_s, used_s = time.monotonic() - self._since_s, self._cpu_s() - self._cpu_since_s
            if used_s < timeout_s and waited_s < _MOST_WAITING * timeout_s:
                return None
            why = f"not compiled after {timeout_s:g} s"
        self.stop()
        return task, Outcome(broken=(f"{task.name}: {why}",))

    def stop(self) -> None:
        self.task, self.is_alive = None, False
        self.connection.close()
        self._process.kill()
        self._process.join()

    def _cpu_s(self) -> float:
        """Processor time of all its threads so far; 0 where it is gone."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return 0.0
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _output(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " ".join(line for line in lines if line and not any(word in line for word in _HARMLESS))[
            -_TAIL:
        ]


def _work(connection: Connection, log: str) -> None:
    """In the worker: tasks in, outcomes out, until the other end closes."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import jax  # noqa: PLC0415 - after its output has a place to go

    jax.config.update("jax_platforms", "cpu")  # no search for a GPU, no checks of CUDA libraries
    while True:
        try:
            task: Any = connection.recv()
        except EOFError:
            return
        connection.send(compile_task(task))
