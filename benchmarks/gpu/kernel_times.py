"""Device time of each kernel at real shapes beside its bound: bytes over the measured rate, FLOPs over the measured rate."""

import jax

from benchmarks.gpu.options import Lines, Options, failed, skipped
from pallas_kernels.device_time import best_method, measure
from pallas_kernels.interpret import interpret_params, reset_interpreter
from pallas_kernels.tunable import OPS, shapes_in_turn

ROUNDS = 5


def run(options: Options) -> Lines:
    method = "wall" if options.is_dry_run else best_method()
    interpret = interpret_params(detect_races=False) if options.is_dry_run else None
    for op, shape in list(shapes_in_turn(is_tiny=options.is_dry_run))[
        : len(OPS) if options.is_dry_run else None
    ]:
        if not options.has_time:
            yield skipped(shape.name, "out of time")
            continue
        try:
            workload = op.make(shape, options.seed)
            prepared = workload.prepare(None, interpret)
            times = measure({"kernel": prepared}, method, 1 if options.is_dry_run else ROUNDS)["kernel"]
        except NotImplementedError as error:
            yield skipped(shape.name, str(error))
            continue
        except Exception as error:  # whatever the compiler or the device raises
            yield failed(shape.name, error)
            continue
        finally:
            if interpret is not None:
                reset_interpreter()
        bound_s, limited_by = workload.bound_s(options.bytes_per_s, options.flops_per_s)
        yield {
            "item": workload.name,
            "us": 1e6 * times.median_s,
            "spread": times.spread,
            "method": times.method,
            "bound_us": 1e6 * bound_s,
            "limited_by": limited_by,
            "percent_of_bound": 100 * bound_s / times.median_s,
            "gbytes_per_s": workload.num_bytes / times.median_s / 1e9,
            "tflops_per_s": workload.num_flops / times.median_s / 1e12,
        }
        del workload, prepared
        jax.clear_caches()
