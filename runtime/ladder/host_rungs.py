"""HostRungs: which executables the other hosts of an engine have. A rung serves when all hosts have compiled it."""

import threading
from collections.abc import Iterable, Set


class HostRungs:
    """Reports by host and name. Thread-safe: reported by the threads that listen to the hosts."""

    def __init__(self, host_ids: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._errors: dict[int, dict[str, str]] = {host: {} for host in host_ids}  # "" where it went well

    def report(self, host: int, name: str, error: str) -> None:
        """A host has compiled a step, or failed with `error`."""
        with self._lock:
            self._errors[host][name] = error

    def forget(self, name: str) -> None:
        """What was said of a step holds no longer: it was freed, or is tried once more."""
        with self._lock:
            for reports in self._errors.values():
                reports.pop(name, None)

    def keep_only(self, names: Set[str]) -> None:
        """The others free every other step, or will when it is compiled."""
        with self._lock:
            for host, reports in self._errors.items():
                self._errors[host] = {name: error for name, error in reports.items() if name in names}

    def is_everywhere(self, name: str) -> bool:
        return all(reports.get(name) == "" for reports in self._errors.values())

    def error(self, name: str) -> str:
        """The first failure of a step, with its host; empty where there is none."""
        found = ((host, reports.get(name)) for host, reports in self._errors.items())
        return next((f"on host {host}: {error}" for host, error in found if error), "")
