"""Seconds of a call on the device, in one of three ways; results say which.

"cupti": the driver's own record of every kernel, without the gaps between them, through Mosaic's profiler. GPUs only.
"chain": one program that makes the call n times, each reading what the last one wrote; the slope between two n has no
    launch and no transfer in it, but gaps between kernels.
"wall": one call on the host's clock; for dry runs in the interpreter, where nothing else is possible.

Contestants take turns, so that a clock that drifts meets all of them alike.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.workload import Prepared

SHORT_CHAIN, LONG_CHAIN = 2, 10
COMPILE_THREADS = 8
METHODS = ("cupti", "chain", "wall")


@dataclass(frozen=True)
class Times:
    """Seconds of each run. spread: largest minus smallest over the median."""

    method: str
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        return (max(self.seconds) - min(self.seconds)) / self.median_s if self.median_s else 0.0


def best_method() -> str:
    """What works here: tried with one small program."""
    if jax.default_backend() != "gpu":
        return "chain"
    try:
        probe = jax.jit(lambda x: x + 1).lower(jnp.zeros(8)).compile()
        is_there = bool(_cupti_s([lambda: probe(jnp.zeros(8))]))
    except Exception:  # no library, no permission, another tool attached: there is another way
        return "chain"
    return "cupti" if is_there else "chain"


def measure(contestants: Mapping[str, Prepared], method: str, rounds: int) -> dict[str, Times]:
    """Times of each contestant: `rounds` turns, in each every link once (cupti), one slope (chain) or one call (wall)."""
    if method not in METHODS:
        raise ValueError(f"method {method!r} is not one of {METHODS}")
    with ThreadPoolExecutor(
        1 if method == "wall" else COMPILE_THREADS
    ) as pool:  # the interpreter takes one at a time
        runners = dict(zip(contestants, pool.map(_RUNNERS[method], contestants.values()), strict=True))
    for runner in runners.values():  # first touch
        runner.run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, runner in runners.items():
            seconds[name] += runner.run()
    return {name: Times(method, tuple(values)) for name, values in seconds.items()}


class _Cupti:
    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._compiled = jax.jit(prepared.function).lower(prepared.links[0], *prepared.args).compile()

    def run(self) -> list[float]:
        return _cupti_s(
            [lambda link=link: self._compiled(link, *self._prepared.args) for link in self._prepared.links]
        )


class _Chain:
    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._programs = [self._compile(n) for n in (SHORT_CHAIN, LONG_CHAIN)]

    def run(self) -> list[float]:
        short_s, long_s = (self._best_s(program) for program in self._programs)
        slope_s = (long_s - short_s) / (LONG_CHAIN - SHORT_CHAIN)
        # Noise above the whole chain: the mean of a call with its launch, which is never too good and never zero.
        return [slope_s if slope_s > 0 else long_s / LONG_CHAIN]

    def _compile(self, num_calls: int) -> Any:
        prepared = self._prepared
        links = jnp.stack(prepared.links)

        def program(links, *args):
            def body(i, carry):
                _, zero = carry
                link = lax.dynamic_index_in_dim(links, i % len(prepared.links), keepdims=False)
                out = prepared.function(link + zero.astype(link.dtype), *args)
                first = jnp.abs(out.reshape(-1)[0].astype(jnp.float32))
                return out, jnp.minimum(first, 0.0)  # a zero that the compiler cannot know

            shape = jax.eval_shape(prepared.function, links[0], *args)
            return lax.fori_loop(0, num_calls, body, (jnp.zeros(shape.shape, shape.dtype), jnp.float32(0)))

        return jax.jit(program).lower(links, *prepared.args).compile()

    def _best_s(self, program: Any) -> float:
        links = jnp.stack(self._prepared.links)
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            jax.block_until_ready(program(links, *self._prepared.args))
            seconds.append(time.perf_counter() - started)
        return min(seconds)


class _Wall:
    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def run(self) -> list[float]:
        started = time.perf_counter()
        jax.block_until_ready(self._prepared.function(self._prepared.links[0], *self._prepared.args))
        return [time.perf_counter() - started]


_RUNNERS = {"cupti": _Cupti, "chain": _Chain, "wall": _Wall}


def _cupti_s(calls: Sequence[Any]) -> list[float]:
    """Seconds of each call: the sum of its kernels. Raises where CUPTI is not to be had."""
    from jax._src.lib import mosaic_gpu  # noqa: PLC0415 - private, and absent on some platforms

    extension = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
    jax.block_until_ready(calls[-1]())  # and not the first: it would find its operands in the cache
    extension._cupti_init()
    try:
        results = [call() for call in calls]
        jax.block_until_ready(results)
    finally:
        timings = extension._cupti_get_timings(True)
    milliseconds = [float(duration) for _, duration in timings]
    if not milliseconds or len(milliseconds) % len(calls):
        raise RuntimeError(f"CUPTI saw {len(milliseconds)} kernels in {len(calls)} equal calls")
    each = len(milliseconds) // len(calls)
    return [sum(milliseconds[i * each : (i + 1) * each]) / 1e3 for i in range(len(calls))]
