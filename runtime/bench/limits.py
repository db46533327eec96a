"""What the machine can do at best: rate of reading memory, rate of matrix products. Bounds for the other measurements.

Both drift on shared machines, within minutes even, so a benchmark takes them in its own run, before and after, in a
process of its own: the probe's arrays must not count as the engine's memory.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

READ_MIB = 512  # far above any cache
PRODUCT_SIZE = 2048


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Best rates seen in one probe; the product rates are XLA's own, zero when not asked for."""

    read_gbps: float
    bf16_gflops: float = 0.0
    f32_gflops: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--read-only", action="store_true", help="skip the matrix products")
    parser.add_argument("--raw", action="store_true", help="one line of JSON instead of a table")


def run(args: argparse.Namespace) -> dict[str, float]:
    """The command `limits`."""
    found = asdict(probe(has_products=not args.read_only))
    if args.raw:
        print(json.dumps(found))
    return found


def probe(*, has_products: bool = True) -> MachineLimits:
    """Measure here and now, in this process (about three seconds)."""
    read = read_gbps()
    if not has_products:
        return MachineLimits(read)
    return MachineLimits(read, product_gflops("bfloat16"), product_gflops("float32"))


def probe_apart(*, has_products: bool = True) -> MachineLimits:
    """The same in a process of its own, which gives its memory back."""
    command = [sys.executable, "-m", "runtime.bench", "limits", "--raw"] + (
        [] if has_products else ["--read-only"]
    )
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)  # noqa: S603
    return MachineLimits(**json.loads(done.stdout.splitlines()[-1]))


def read_gbps(num_mib: int = READ_MIB, repeats: int = 8) -> float:
    """GB/s of reading an array once with a thread for each core; the largest value of integers needs no arithmetic."""
    num_threads = len(os.sched_getaffinity(0))
    array = np.ones(num_mib << 17, np.int64)
    parts = np.array_split(array, num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        seconds = _best_s(lambda: list(pool.map(np.max, parts)), repeats)
    return significant(array.nbytes / seconds / 1e9)


def product_gflops(dtype: str, size: int = PRODUCT_SIZE, repeats: int = 5) -> float:
    """GFLOP/s of one square product through XLA on the default device."""
    import jax  # noqa: PLC0415 - the read probe must not pay for it
    import jax.numpy as jnp  # noqa: PLC0415

    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    return significant(2 * size**3 / _best_s(lambda: jax.block_until_ready(product(x, x)), repeats) / 1e9)


def significant(rate: float) -> float:
    """Four digits of a rate: others are divided by it, and it is never zero, however slow the machine."""
    return float(f"{rate:.4g}")


def _best_s(call: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
