"""Hosts with other XLA flags or other kernels than host 0's do not work together."""

import threading
from queue import SimpleQueue

import pytest

from runtime.config import parse_config
from runtime.engine.build import check_same_backend
from runtime.engine.device_kind import check_same_devices, device_kind
from runtime.engine.host_greeting import differences, make_greeting
from runtime.errors import ModelLoadError


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        ("--xla_a=1 --xla_b=2", ""),
        ("--xla_b=2  --xla_a=1 --xla_dump_to=/tmp/x --xla_force_host_platform_device_count=4", ""),
        ("--xla_b=2", "XLA_FLAGS --xla_a is 1 on host 0, None on host 1"),
        ("--xla_a=1 --xla_b=3", "XLA_FLAGS --xla_b is 2 on host 0, 3 on host 1"),
        ("--xla_a=1 --xla_b=2 --xla_c", "XLA_FLAGS --xla_c is None on host 0,  on host 1"),
    ],
)
def test_other_xla_flags_are_named(tmp_path, monkeypatch, theirs, text) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = parse_config({})
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_b=2 --xla_force_host_platform_device_count=8")
    mine = make_greeting(config, tmp_path)
    monkeypatch.setenv("XLA_FLAGS", theirs)
    assert differences(mine, make_greeting(config, tmp_path), 1) == text


class Meeting:
    """What `smallest` is on two hosts in two threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60)
        self._numbers: list[int] = []

    def smallest(self, number: int) -> int:
        self._numbers.append(number)
        self._barrier.wait()
        found = min(self._numbers)
        if self._barrier.wait() == 0:
            self._numbers.clear()
        self._barrier.wait()
        return found


def ends_of_both(check) -> list[str]:
    """What check(number of the host, meeting) says on two hosts that meet."""
    meeting, ends = Meeting(), SimpleQueue[str]()

    def run(number: int) -> None:
        try:
            check(number, meeting)
            ends.put("")
        except ModelLoadError as error:
            ends.put(error.message)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [ends.get_nowait() for _ in threads]


@pytest.mark.parametrize(
    ("kinds", "is_same"), [(("H200", "H200"), True), (("H200", "H100"), False), (("cpu a", "cpu b"), False)]
)
def test_other_devices_end_the_start_of_both_hosts(kinds, is_same) -> None:
    texts = ends_of_both(lambda number, meeting: check_same_devices(kinds[number], meeting))
    if is_same:
        assert texts == ["", ""]
    else:
        assert sorted(text.split("this one has ")[1] for text in texts) == sorted(kinds)


def test_a_cpu_is_told_by_its_features_whatever_their_order(tmp_path, monkeypatch) -> None:
    kinds = []
    for flags in ("fma avx2", "avx2 fma", "avx2"):
        (tmp_path / "cpuinfo").write_text(f"model name : x\nflags\t\t: {flags}\n\nflags : sse\n")
        monkeypatch.setattr("runtime.engine.device_kind.CPU_INFO", tmp_path / "cpuinfo")
        kinds.append(device_kind())
    assert kinds[0] == kinds[1] != kinds[2]
    monkeypatch.setattr("runtime.engine.device_kind.CPU_INFO", tmp_path / "none")
    assert device_kind().startswith("cpu")


@pytest.mark.parametrize(
    ("names", "is_same"), [(("xla", "xla"), True), (("xla", "native"), False), (("native", "xla"), False)]
)
def test_other_kernels_end_the_start_of_both_hosts(names, is_same) -> None:
    texts = ends_of_both(lambda number, meeting: check_same_backend(names[number], meeting))
    if is_same:
        assert texts == ["", ""]
    else:
        assert all("by native on one host and by xla on another" in text for text in texts)
        assert {text.split("this one has ")[1].split()[0] for text in texts} == set(names)
