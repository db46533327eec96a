"""What the PTX assembler and Mosaic say about a compiled kernel, and the budgets that every kernel is held to."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_SHARED_BYTES = 227 * 1024  # of one block on Hopper
MAX_REGISTERS = 255  # of one thread; at 255 the assembler may have spilled
SERIALIZED = re.compile(r"wgmma\S* instructions are serialized", re.IGNORECASE)


@dataclass(frozen=True)
class KernelReport:
    """One Mosaic kernel. spill_bytes: stores of registers to memory. wgmma, tma: instructions in the PTX."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: int
    tma: int
    seconds: float
    is_serialized: bool = False  # wgmma instructions wait for each other
    unguarded_loops: int = 0  # see `count_unguarded_loops`

    def broken_budgets(self, *, needs_wgmma: bool = True, max_spill_bytes: int = 0) -> list[str]:
        """Sentences, empty where all is well."""
        broken = []
        if self.spill_bytes > max_spill_bytes:
            broken.append(f"spills {self.spill_bytes} bytes, at most {max_spill_bytes} are allowed")
        if self.shared_bytes > MAX_SHARED_BYTES:
            broken.append(f"takes {self.shared_bytes} bytes of shared memory, a block has {MAX_SHARED_BYTES}")
        if needs_wgmma and not self.wgmma:
            broken.append("has no wgmma instruction")
        if self.is_serialized:
            broken.append("its wgmma instructions are serialized")
        if self.unguarded_loops:
            broken.append(f"refills shared memory in {self.unguarded_loops} loops that never wait for wgmma")
        return [f"{self.name}: {sentence}" for sentence in broken]


def read_reports(folder: Path, name: str, seconds: float) -> list[KernelReport]:
    """Every kernel that Mosaic dumped to the folder, in the order of compilation; several get [0], [1], ... appended.

    Raises ValueError where a dump is not what these versions of JAX write.
    """
    dumps = sorted(folder.glob("*.ptxas"), key=lambda path: path.stat().st_mtime_ns)
    names = [name] if len(dumps) == 1 else [f"{name}[{i}]" for i in range(len(dumps))]
    return [_read(path, label, seconds) for path, label in zip(dumps, names, strict=True)]


def _read(ptxas: Path, name: str, seconds: float) -> KernelReport:
    log, ptx = ptxas.read_text(encoding="utf-8"), ptxas.with_suffix(".ptx").read_text(encoding="utf-8")
    resources = ptxas.with_name(ptxas.stem + ".resources.txt").read_text(encoding="utf-8")
    return KernelReport(
        name=name,
        registers=_number(r"Used (\d+) registers", log, ptxas.name),
        spill_bytes=_number(r"(\d+) bytes spill stores", log, ptxas.name),
        shared_bytes=_number(r"smem_scratch_bytes=(\d+)", resources, ptxas.name) + _barrier_bytes(resources),
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        tma=len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        seconds=round(seconds, 2),
        is_serialized=SERIALIZED.search(log) is not None,
        unguarded_loops=count_unguarded_loops(ptx),
    )


def _number(pattern: str, text: str, where: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{where}: nothing like {pattern!r} in Mosaic's dump")
    return int(found[1])


def _barrier_bytes(resources: str) -> int:
    """Eight bytes for each barrier of `Barrier(..., num_barriers=4, ...): 1`."""
    groups = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
    return 8 * sum(int(num) * int(times) for num, times in groups)


def count_unguarded_loops(ptx: str) -> int:
    """Loops that multiply by wgmma and start a TMA load, but wait for no product: the load may overwrite its operands.

    A loop is what lies between a label and a jump back to it. What the compiler unrolled altogether is not seen.
    """
    return sum(
        "wgmma.mma_async" in body and "shared::cluster.global" in body and "wgmma.wait_group" not in body
        for body in _loops(ptx)
    )


def _loops(ptx: str) -> Iterator[str]:
    lines = ptx.splitlines()
    labels: dict[str, int] = {}
    for i, line in enumerate(lines):
        label = re.match(r"(\$L\w+):", line)
        if label:
            labels[label[1]] = i
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line)
        if jump and jump[1] in labels:
            yield "\n".join(lines[labels[jump[1]] : i])
