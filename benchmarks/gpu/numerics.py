"""Every kernel on the chip against float32 references: real shapes and every small case.

Before each call as much memory as it will need is filled with NaN and given back, so that what a kernel forgets to write is
a NaN and not last call's right answer.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.options import Line, Lines, Options, failed, skipped
from benchmarks.gpu.small_case import SmallCase
from benchmarks.gpu.small_cases import small_cases
from pallas_kernels.interpret import interpret_params, races_found, reset_interpreter
from pallas_kernels.tunable import OPS, Tunable, shapes_in_turn
from pallas_kernels.workload import Errors, Workload, compare

COMPILE_THREADS = 8


def run(options: Options) -> Lines:
    """A real shape of every op, the small cases, the other real shapes."""
    shapes = list(shapes_in_turn(is_tiny=options.is_dry_run))
    yield from _run_real(shapes[: len(OPS)], options)
    yield from _run_small(options)
    yield from _run_real(shapes[len(OPS) :], options)


def _run_real(shapes: Sequence[tuple[Tunable, Any]], options: Options) -> Lines:
    for op, shape in shapes:
        if not options.has_time:
            yield skipped(shape.name, "out of time")
            continue
        try:
            yield _check_workload(op.make(shape, options.seed), options)
        except NotImplementedError as error:
            yield skipped(shape.name, str(error))
        except Exception as error:  # whatever the compiler or the device raises
            yield failed(shape.name, error)


def _check_workload(workload: Workload, options: Options) -> Line:
    interpret = interpret_params() if options.is_dry_run else None
    prepared = workload.prepare(None, interpret)
    expected = workload.expected()
    out = _call(prepared.function, (prepared.links[0], *prepared.args), is_compiled=interpret is None)
    return _line(
        workload.name, compare(out[prepared.sampled], expected), is_interpreted=interpret is not None
    )


def _run_small(options: Options) -> Lines:
    """Compiled in threads: that is what takes the time."""
    cases = [c for c in small_cases(options.seed) if c.is_short or not options.is_dry_run]
    if options.is_dry_run:
        for case in cases:
            out = case.kernel(interpret_params())(*case.args)
            yield _line(case.name, compare(out, case.reference(*case.args)), is_interpreted=True)
        return
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        waiting = [(case, pool.submit(_compile, case)) for case in cases]
        for case, future in waiting:
            if not options.has_time:
                future.cancel()
                yield skipped(case.name, "out of time")
                continue
            try:
                kernel, reference = future.result()
                out = _call(kernel, case.args, is_compiled=True)
                yield _line(case.name, compare(out, reference(*case.args)), is_interpreted=False)
            except Exception as error:  # as above
                yield failed(case.name, error)


def _compile(case: SmallCase) -> tuple[Any, Any]:
    kernel = jax.jit(case.kernel(None)).lower(*case.args).compile()
    with jax.default_matmul_precision("highest"):
        return kernel, jax.jit(case.reference).lower(*case.args).compile()


def _call(function: Callable[..., Any], args: tuple[Any, ...], *, is_compiled: bool) -> jax.Array:
    """The result, where nothing that was in memory before can pass for it."""
    if not is_compiled:  # the interpreter fills outputs with NaN by itself
        return function(*args)
    compiled: Any = (
        function if hasattr(function, "memory_analysis") else jax.jit(function).lower(*args).compile()
    )
    memory = compiled.memory_analysis()
    _poison(int(memory.temp_size_in_bytes), int(memory.output_size_in_bytes))
    return jax.block_until_ready(compiled(*args))


def _poison(*num_bytes: int) -> None:
    arrays = [jnp.full((max(1, n // 4),), jnp.nan, jnp.float32) for n in num_bytes]
    jax.block_until_ready(arrays)


def _line(name: str, errors: Errors, *, is_interpreted: bool) -> Line:
    line: Line = {"item": name, "is_right": errors.is_right, **asdict(errors)}
    if is_interpreted:
        line["has_races"] = races_found()
        line["is_right"] = errors.is_right and not line["has_races"]
        reset_interpreter()
    return line
