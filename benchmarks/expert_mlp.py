"""Routed experts and dense products on CPU against the measured bound.

    python benchmarks/expert_mlp.py [--shape bench-M] [--tokens 1,8,32,512] [--backends native,xla] [--json FILE]

Backends alternate in one process, call by call, so that each meets the same machine.
The bound is what two threads of numpy read from memory in the same run, alternating with the op: the machine's bandwidth
drifts by a factor of two within hours, so a figure without its own bound says little. `cpu ms` is processor time over
all threads: it stays steady when other programs take a core, wall time does not.
"""

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.backend import BACKENDS
from pallas_kernels.expert_mlp.cases import MODEL_SHAPES, ModelShape
from pallas_kernels.expert_mlp.op import expert_mlp, pack_expert_weights
from pallas_kernels.expert_mlp.xla import choose_block_sizes
from pallas_kernels.linear.op import linear
from runtime.bench.report import machine_stamp, write_json

NUM_ROUTINGS = 6  # different routings, so that no expert stays in cache from call to call
BOUND_BYTES = 256 << 20


@dataclass(frozen=True)
class Measurement:
    """One row of the table; times are for one layer."""

    op: str
    backend: str
    num_tokens: int
    block_sizes: tuple[int, ...]
    wall_ms_min: float
    wall_ms_median: float
    cpu_ms_min: float
    gb_per_s: float
    gflop_per_s: float
    bound_gb_per_s: float

    @property
    def fraction_of_bound(self) -> float:
        return self.gb_per_s / self.bound_gb_per_s


def main() -> None:
    options = parse_options()
    shape = next(shape for shape in MODEL_SHAPES if shape.name == options.shape)
    layers = [random_experts(shape, seed) for seed in range(options.layers)]
    bound = memory_reader()
    rows: list[Measurement] = []
    print(
        "op                   tokens backend    blocks  wall ms min / median  cpu ms   GB/s       of bound  GFLOP/s"
    )
    for num_tokens in options.tokens:
        rows += measure_experts(shape, layers, num_tokens, options.backends, bound, options.seconds)
        print_rows(rows[-len(options.backends) :])
    for out, num_rows in [(1536, 1), (1536, 8), (1536, 32), (32000, 1), (32000, 8), (32000, 32)]:
        rows += measure_linear(shape.d, out, num_rows, options.backends, bound, options.seconds)
        print_rows(rows[-len(options.backends) :])
    if options.json:
        write_report(options.json, shape, rows)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="bench-M", choices=[shape.name for shape in MODEL_SHAPES])
    parser.add_argument(
        "--tokens", default=[1, 4, 8, 16, 32, 64, 128, 512], type=lambda s: [int(n) for n in s.split(",")]
    )
    parser.add_argument("--backends", default=backends_here(), type=lambda s: s.split(","))
    parser.add_argument("--layers", default=2, type=int)
    parser.add_argument("--seconds", default=4.0, type=float, help="per row of the table")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def backends_here() -> list[str]:
    return [row.name for row in BACKENDS if row.name in {"native", "xla"} and row.unavailable() is None]


def random_experts(shape: ModelShape, seed: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    e, d, f = shape.num_experts, shape.d, shape.f
    gate, up = rng.standard_normal((2, e, f, d), dtype=np.float32) * d**-0.5
    down = rng.standard_normal((e, d, f), dtype=np.float32) * f**-0.5
    packed = pack_expert_weights(*(w.astype(ml_dtypes.bfloat16) for w in (gate, up, down)))
    return jnp.asarray(packed[0]), jnp.asarray(packed[1])


def memory_reader() -> Callable[[], None]:
    """Reads BOUND_BYTES with two threads; a dot of a buffer with itself reads it once and does little else."""
    halves = np.split(np.ones(BOUND_BYTES // 4, np.float32), 2)
    pool = ThreadPoolExecutor(2)

    def read_part(half: np.ndarray) -> None:
        for chunk in np.split(half, 64):
            np.dot(chunk, chunk)

    def read() -> None:
        list(pool.map(read_part, halves))

    return read


def measure_experts(
    shape: ModelShape,
    layers: list[tuple[jax.Array, jax.Array]],
    num_tokens: int,
    backends: list[str],
    bound: Callable[[], None],
    seconds: float,
) -> list[Measurement]:
    """A step of several unrolled layers, each with its own weights and routing."""
    routings = [
        np.stack([shape.routed_group_sizes(num_tokens, seed=100 * i + n) for n in range(len(layers))])
        for i in range(NUM_ROUTINGS)
    ]
    num_rows = num_tokens * shape.top_k
    x = jnp.asarray(np.random.default_rng(0).standard_normal((num_rows, shape.d)), jnp.bfloat16)

    @partial(jax.jit, static_argnums=0)
    def step(
        backend: str, x: jax.Array, layers: list[tuple[jax.Array, jax.Array]], sizes: jax.Array
    ) -> jax.Array:
        for n, (w_gate_up, w_down) in enumerate(layers):
            x = expert_mlp(x, w_gate_up, w_down, sizes[n], backend=backend)
        return x

    calls = {
        name: [
            lambda sizes=sizes, name=name: step(name, x, layers, sizes).block_until_ready()
            for sizes in routings
        ]
        for name in backends
    }
    experts_hit = float(np.mean([np.count_nonzero(sizes) for sizes in routings]))
    return measure(
        f"experts {shape.name}",
        num_tokens,
        choose_block_sizes(num_rows, shape.num_experts),
        calls,
        bound,
        seconds,
        num_layers=len(layers),
        num_bytes=experts_hit * 3 * shape.d * shape.f * 2,
        num_flops=len(layers) * num_rows * 6 * shape.d * shape.f,
    )


def measure_linear(
    d: int, out: int, num_rows: int, backends: list[str], bound: Callable[[], None], seconds: float
) -> list[Measurement]:
    num_layers = max(2, (96 << 20) // (out * d * 2))  # more bytes than the last-level cache holds
    rng = np.random.default_rng(0)
    weights = [
        jnp.asarray(rng.standard_normal((out, d), dtype=np.float32) * d**-0.5, jnp.bfloat16)
        for _ in range(num_layers)
    ]
    x = jnp.asarray(rng.standard_normal((num_rows, d)), jnp.bfloat16)

    @partial(jax.jit, static_argnums=0)
    def step(backend: str, x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for w in weights:
            x = x + linear(x, w, backend=backend)[:, :1]  # each product waits for the one before
        return x

    return measure(
        f"linear {d}x{out}",
        num_rows,
        (),
        {name: [lambda name=name: step(name, x, weights).block_until_ready()] for name in backends},
        bound,
        seconds,
        num_layers=num_layers,
        num_bytes=num_layers * out * d * 2,
        num_flops=num_layers * 2 * num_rows * out * d,
    )


def measure(
    op: str,
    num_tokens: int,
    block_sizes: tuple[int, ...],
    calls: dict[str, list[Callable[[], object]]],
    bound: Callable[[], None],
    seconds: float,
    *,
    num_layers: int,
    num_bytes: float,
    num_flops: float,
) -> list[Measurement]:
    """Alternate the backends and the bound for `seconds`. Bytes and flops are per call, over all layers."""
    for of_backend in calls.values():
        of_backend[0]()
    wall = {name: [] for name in calls}
    cpu = {name: [] for name in calls}
    bounds = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(bounds) < 3:
        for name, of_backend in calls.items():
            cpu_start = time.process_time()
            for call in of_backend:
                start = time.perf_counter()
                call()
                wall[name].append(time.perf_counter() - start)
            cpu[name].append((time.process_time() - cpu_start) / len(of_backend))
        start = time.perf_counter()
        bound()
        bounds.append(time.perf_counter() - start)
    return [
        Measurement(
            op=op,
            backend=name,
            num_tokens=num_tokens,
            block_sizes=block_sizes if name == "xla" else (),
            wall_ms_min=min(wall[name]) / num_layers * 1e3,
            wall_ms_median=float(np.median(wall[name])) / num_layers * 1e3,
            cpu_ms_min=min(cpu[name]) / num_layers * 1e3,
            gb_per_s=num_bytes / min(wall[name]) / 1e9,
            gflop_per_s=num_flops / min(wall[name]) / 1e9,
            bound_gb_per_s=BOUND_BYTES / min(bounds) / 1e9,
        )
        for name in calls
    ]


def print_rows(rows: list[Measurement]) -> None:
    for row in rows:
        blocks = ",".join(map(str, row.block_sizes)) or "-"
        cells = [
            f"{row.op:20} {row.num_tokens:6} {row.backend:7} {blocks:>9}",
            f"{row.wall_ms_min:12.2f} /{row.wall_ms_median:7.2f} {row.cpu_ms_min:7.2f}",
            f"{row.gb_per_s:6.1f} {row.fraction_of_bound:5.0%} of {row.bound_gb_per_s:5.1f} {row.gflop_per_s:8.0f}",
        ]
        print(*cells, flush=True)


def write_report(path: Path, shape: ModelShape, rows: list[Measurement]) -> None:
    report = {
        "machine": machine_stamp(),
        "load_average": os.getloadavg(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "shape": asdict(shape),
        "rows": [asdict(row) for row in rows],
    }
    write_json(path, report)


if __name__ == "__main__":
    main()
