"""What stands between the start and the end of each exchange in a compiled program, and how long both would take. No JAX.

Only grouped and attention products of the *other* half count: their own half waits for the exchange. Times are bounds from
shapes at the data sheet's rates of an H200, the same for both sides; nobody has measured them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

_WIDTH = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
_SHAPE = re.compile(r"\b(pred|s8|u8|f8e4m3fn|bf16|f16|f32|s32|u32)\[([\d,]*)\]")
_ATTENTION_KERNEL = re.compile(r"/(?:paged|prefill)_attention/")


@dataclass(frozen=True)
class Machine:
    """H200 SXM by its data sheet: bf16 products, HBM3e, NVLink 4 in one direction; launch_s: of one exchange."""

    flops_s: float = 989e12
    hbm_bytes_s: float = 4.8e12
    link_bytes_s: float = 450e9
    launch_s: float = 3e-6


@dataclass(frozen=True)
class Load:
    """What shapes do not tell. context: keys that a token attends to, on average; grouped_rows: rows that a device's
    experts compute for one half, evenly spread, of the room that the arrays have; num_devices: that exchange."""

    context: float
    grouped_rows: int
    num_devices: int


@dataclass(frozen=True)
class Op:
    """An instruction in the order of issue. text: its line, and the computation that it calls."""

    name: str
    kind: str
    line: str
    text: str

    @property
    def scope(self) -> str:
        """The longest op_name: a fusion's own may be empty."""
        return max(re.findall(r'op_name="([^"]*)"', self.text), key=len, default="")

    @property
    def half(self) -> int | None:
        found = re.search(r"/half_([01])/", self.text)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class Window:
    """One exchange. between: products of the other half from its start to its end, as ("experts" or "attention", seconds)."""

    half: int | None
    scope: str
    exchange_s: float
    between: tuple[tuple[str, float], ...]
    is_asynchronous: bool

    @property
    def product_s(self) -> float:
        return sum(s for _, s in self.between)

    @property
    def pattern(self) -> str:
        return (
            f"{self.scope} over {' and '.join(dict.fromkeys(kind for kind, _ in self.between)) or 'nothing'}"
        )

    @property
    def is_covered(self) -> bool:
        return self.is_asynchronous and self.product_s >= self.exchange_s

    @property
    def exposed_s(self) -> float:
        return max(0.0, self.exchange_s - self.product_s) if self.is_asynchronous else self.exchange_s


def read_windows(hlo: str, load: Load, machine: Machine) -> list[Window]:
    """Every all-to-all of the entry computation, or of the body of its largest loop where decode steps turn."""
    ops, windows = schedule(hlo), []
    for i, op in enumerate(ops):
        is_start = op.kind == "all-to-all-start" or (op.kind == "async-start" and "all-to-all" in op.line)
        if op.kind != "all-to-all" and not is_start:
            continue
        inside: Sequence[Op] = ()
        if is_start:
            done = op.kind.replace("start", "done")
            end = next(j for j, o in enumerate(ops) if o.kind == done and f"%{op.name})" in o.line)
            inside = ops[i + 1 : end]
        products = (_product(o, load, machine) for o in inside if o.half is not None and o.half != op.half)
        between = tuple(p for p in products if p is not None)
        scope = "combine" if "/combine/" in op.scope else "dispatch"
        seconds = _exchange_s(op.line, load, machine)
        windows.append(Window(op.half, scope, seconds, between, is_start))
    return windows


def summarise(windows: Sequence[Window]) -> dict[str, object]:
    """Shares and sums over the windows of a program; times in microseconds, of a pattern those of its first window."""
    by_pattern: dict[str, list[Window]] = {}
    for window in windows:
        by_pattern.setdefault(window.pattern, []).append(window)
    covered = sum(w.is_covered for w in windows)
    return {
        "exchanges": len(windows),
        "synchronous": sum(not w.is_asynchronous for w in windows),
        "with_product": sum(bool(w.between) for w in windows),
        "covered_in_time": covered,
        "share": covered / len(windows) if windows else 0.0,
        "exchange_us": _micro(w.exchange_s for w in windows),
        "exposed_us": _micro(w.exposed_s for w in windows),
        "patterns": {
            name: {
                "count": len(some),
                "exchange_us": _micro(w.exchange_s for w in some[:1]),
                "product_us": _micro(w.product_s for w in some[:1]),
            }
            for name, some in by_pattern.items()
        },
    }


def _micro(seconds: Iterable[float]) -> float:
    return round(1e6 * sum(seconds), 1)


def schedule(hlo: str) -> list[Op]:
    """The computation with most all-to-alls, in the order in which it is issued."""
    computations = {m[1]: m[0] for m in re.finditer(r"^(?:ENTRY )?%?(\S+) \(.*?^}", hlo, re.M | re.S)}
    text = max(computations.values(), key=lambda t: t.count("all-to-all"), default="")
    return list(_ops(text, computations))


def _ops(text: str, computations: Mapping[str, str]) -> Iterator[Op]:
    for found in re.finditer(r"^\s*(?:ROOT )?%(\S+) = .*? ([a-z0-9\-]+)\(.*$", text, re.M):
        called = re.search(r"calls=%([^\s,]+)", found[0])
        body = computations.get(called[1], "") if called else ""
        yield Op(found[1], found[2], found[0], f"{found[0]}\n{body}")


def _exchange_s(line: str, load: Load, machine: Machine) -> float:
    """Of the bytes that leave a device; the part that it keeps does not travel."""
    kind, dims = _shapes(line)[0]
    bytes_sent = _num_bytes(kind, dims) * (load.num_devices - 1) / load.num_devices
    return bytes_sent / machine.link_bytes_s + machine.launch_s


def _product(op: Op, load: Load, machine: Machine) -> tuple[str, float] | None:
    """(kind, seconds) of a product that counts, judged by what the op calls and never by the names of its operands."""
    call = re.search(r"custom_call_target=\"mosaic_gpu[^\n]*?operand_layout_constraints=\{(.*?\})\}", op.text)
    scopes = re.findall(r'op_name="([^"]*)"', op.text)
    if call is not None:
        operands = _shapes(call[1])
        if any("/experts/" in scope for scope in scopes):
            return "experts", _grouped_s(operands, load, machine)
        if any(_ATTENTION_KERNEL.search(scope) for scope in scopes):
            return "attention", _attention_s(operands, load, machine)
        return None
    dot = re.search(r"^.* dot\(.*$", op.text, re.M)
    if dot is not None and "/attention/" in op.scope:
        return "attention", _dot_s(dot[0], op.text, machine)
    return None


def _grouped_s(operands: Sequence[tuple[str, tuple[int, ...]]], load: Load, machine: Machine) -> float:
    """[rows, K] times weights [S, N, K]: each slot's weights are read once, rows as an even spread makes them."""
    kind, (slots, outputs, depth) = next((k, d) for k, d in operands if len(d) == 3)
    flops = 2 * load.grouped_rows * outputs * depth
    moved = _num_bytes(kind, (slots, outputs, depth)) + load.grouped_rows * (outputs + depth) * _WIDTH[kind]
    return max(flops / machine.flops_s, moved / machine.hbm_bytes_s)


def _attention_s(operands: Sequence[tuple[str, tuple[int, ...]]], load: Load, machine: Machine) -> float:
    """Queries [B, K, G, Dh], a row each, read their own keys; [T, H, Dh] of prefill share theirs, here of one prompt."""
    kind, pages = next((k, d) for k, d in operands if len(d) == 5)
    queries = next(d for k, d in operands if k == kind and len(d) in (3, 4) and d[-1] == pages[-1])
    _, _, kv_heads, _, head_dim = pages
    flops = 4 * prod(queries) * load.context
    readers = queries[0] if len(queries) == 4 else 1
    moved = readers * load.context * 2 * kv_heads * head_dim * _WIDTH[kind]
    return max(flops / machine.flops_s, moved / machine.hbm_bytes_s)


def _dot_s(line: str, text: str, machine: Machine) -> float:
    (out_kind, out), *_ = _shapes(line)
    shapes = {m[1]: _shapes(m[0])[0] for m in re.finditer(r"%(\S+) = [^\n]*", text) if _shapes(m[0])}
    operands = [
        shapes[name] for name in re.findall(r"%([^\s,)]+)", line.split(" dot(")[1].split(")", maxsplit=1)[0])
    ]
    contracted = re.search(r"lhs_contracting_dims=\{(\d+)", line)
    depth = operands[0][1][int(contracted[1])] if contracted else 1
    moved = sum(_num_bytes(kind, dims) for kind, dims in operands) + _num_bytes(out_kind, out)
    return max(2 * prod(out) * depth / machine.flops_s, moved / machine.hbm_bytes_s)


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(m[1], tuple(int(d) for d in m[2].split(",") if d)) for m in _SHAPE.finditer(text)]


def _num_bytes(kind: str, dims: tuple[int, ...]) -> int:
    return _WIDTH[kind] * prod(dims)
