"""What the device is and what it can do at best: bytes a second of reading and copying, products a second in bfloat16."""

import jax
import jax.numpy as jnp

from benchmarks.gpu.options import Lines, Options
from pallas_kernels.device_time import best_method, measure
from pallas_kernels.workload import Prepared


def run(options: Options) -> Lines:
    device = jax.devices()[0]
    method = "wall" if options.is_dry_run else best_method()  # a slope of calls this short would be noise
    yield {
        "item": "device",
        "kind": device.device_kind,
        "platform": device.platform,
        "compute_capability": str(getattr(device, "compute_capability", "none")),
        "num_devices": len(jax.devices()),
        "jax": jax.__version__,
        "timing": method,
    }
    rounds = 2 if options.is_dry_run else 8
    num = 1 << (16 if options.is_dry_run else 30)  # float32 values: far above any cache
    size = 128 if options.is_dry_run else 8192
    zero = (jnp.zeros(1, jnp.int32),)
    none = jnp.zeros(1, jnp.int32)
    x = jax.random.normal(jax.random.key(options.seed), (num,), jnp.float32)
    read = Prepared(lambda link, x: jnp.max(x + link[0])[None], zero, (x,), none)
    copy = Prepared(lambda link, x: x + (1 + link[0]), zero, (x,), none)
    times = measure({"read": read, "copy": copy}, method, rounds)
    rates = {"read": x.nbytes / times["read"].median_s, "copy": 2 * x.nbytes / times["copy"].median_s}
    for name, rate in rates.items():
        yield {"item": name, "bytes_per_s": rate, "spread": times[name].spread, "method": method}
    del x, read, copy
    a, b = (jax.random.normal(jax.random.key(s), (size, size), jnp.bfloat16) for s in (1, 2))
    product = Prepared(lambda link, a, b: (a + link[0].astype(a.dtype)) @ b, zero, (a, b), none)
    time = measure({"product": product}, method, rounds)["product"]
    rate = 2 * size**3 / time.median_s
    yield {"item": "product", "flops_per_s": rate, "spread": time.spread, "method": method}
    yield {"item": "limits", "bytes_per_s": max(rates.values()), "flops_per_s": rate}
