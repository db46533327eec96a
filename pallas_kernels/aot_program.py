"""What a compiled program's text shows: collectives and what hides them, and products computed for every expert.

The text is scheduled: the order of its lines is the order in which the host issues them. A window between the start and the
end of a collective with a kernel in it can hide the collective; whether it does takes a trace on several GPUs.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

COLLECTIVES = (
    "all-to-all",
    "ragged-all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)
_KERNEL_CALL = re.compile(r'custom_call_target="(?:mosaic_gpu|__cublas|__cudnn|__triton)')
_OP = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<op>[a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b[a-z]+\d+\w*\[([\d,]+)\]")
# Ops whose result is a view of something that another line has made.
_VIEWS = frozenset(
    ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "opt-barrier")
)


@dataclass(frozen=True)
class Collectives:
    """exposed: synchronous ones, and those with no kernel between start and end. overlapped: the others."""

    exposed: int
    overlapped: int


@dataclass(frozen=True)
class _Line:
    name: str
    result: str
    op: str
    text: str


def count_collectives(program: str) -> Collectives:
    """Over every computation that is issued line by line: the entry, and the bodies of loops and branches."""
    computations = dict(_computations(program))
    kernels = {
        name for name, lines in computations.items() if any(_KERNEL_CALL.search(li.text) for li in lines)
    }
    moving = {name for name, lines in computations.items() if any(li.op in COLLECTIVES for li in lines)}
    inlined = _called_by(computations, ("fusion", "async-start"))
    exposed = overlapped = 0
    for name, lines in computations.items():
        if name in inlined:
            continue
        for i, line in enumerate(lines):
            if line.op in COLLECTIVES:
                exposed += 1
            elif _starts_collective(line, moving):
                window = lines[i + 1 : _end_of(lines, i)]
                is_hidden = any(_is_kernel(other, kernels) for other in window)
                exposed, overlapped = exposed + (not is_hidden), overlapped + is_hidden
    return Collectives(exposed, overlapped)


def dense_arrays(program: str, min_elements: int) -> list[str]:
    """Lines that write an array of at least so many elements, shortened.

    Not counted: views, and arrays with the shape of an argument, which are updated in place or judged by memory.
    """
    computations = dict(_computations(program))
    entry = dict(_computations(program[max(0, program.find("\nENTRY ")) :]))
    given = {
        dims
        for lines in entry.values()
        for line in lines
        if line.op == "parameter"
        for dims in _dims(line.result)
    }
    inlined = _called_by(computations, ("fusion",))  # inner values of a fusion are never stored
    found = []
    for name, lines in computations.items():
        for line in lines if name not in inlined else ():
            shapes = [dims for dims in _dims(line.result) if dims not in given]
            if line.op not in _VIEWS and any(math.prod(dims) >= min_elements for dims in shapes):
                found.append(f"{line.name} = {line.result[:80]} {line.op}")
    return found


def _dims(result: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, dims.split(","))) for dims in _SHAPE.findall(result)]


def _computations(program: str) -> Iterator[tuple[str, list[_Line]]]:
    for m in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?^}", program, re.MULTILINE | re.DOTALL):
        lines = (_OP.match(text) for text in m[0].splitlines())
        yield m[1], [_Line(li["name"], li["type"], li["op"], li.string) for li in lines if li is not None]


def _called_by(computations: dict[str, list[_Line]], ops: tuple[str, ...]) -> set[str]:
    calls = (
        re.search(r"calls=%?([\w.\-]+)", li.text)
        for lines in computations.values()
        for li in lines
        if li.op in ops
    )
    return {call[1] for call in calls if call is not None}


def _starts_collective(line: _Line, moving: set[str]) -> bool:
    if line.op.removesuffix("-start") in COLLECTIVES:
        return line.op.endswith("-start")
    called = re.search(r"calls=%?([\w.\-]+)", line.text)
    return line.op == "async-start" and called is not None and called[1] in moving


def _end_of(lines: list[_Line], start: int) -> int:
    """The line that waits for what `start` began; the end of the computation if none does."""
    operand = re.compile(rf"\((?:[^()]*\s)?%?{re.escape(lines[start].name)}\)")
    done = (
        j
        for j in range(start + 1, len(lines))
        if lines[j].op.endswith("-done") and operand.search(lines[j].text) is not None
    )
    return next(done, len(lines))


def _is_kernel(line: _Line, kernels: set[str]) -> bool:
    """Judged by what an op calls, never by its operands: a small fusion may read a value that is named gemm.

    XLA folds the slice of a stacked weight and the call that reads it into one fusion.
    """
    if line.op == "fusion":
        called = re.search(r"calls=%?([\w.\-]+)", line.text)
        return '"__triton' in line.text or (called is not None and called[1] in kernels)
    return line.op == "custom-call" and _KERNEL_CALL.search(line.text) is not None
