"""The kernels beside what others offer for the same work: `lax.ragged_dot` and cuDNN attention in turns with ours, then
torch's grouped matmul in a process of its own. Nothing of this is used by the server.
"""

import importlib.util
import statistics
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.gpu.options import Line, Lines, Options, skipped
from pallas_kernels.device_time import Times, best_method, measure
from pallas_kernels.grouped_matmul.cases import Product
from pallas_kernels.grouped_matmul.workload import make_workload as make_product
from pallas_kernels.interpret import interpret_params, reset_interpreter
from pallas_kernels.paged_attention.cases import MODEL_SHAPES, ModelShape
from pallas_kernels.paged_attention.workload import Decode
from pallas_kernels.paged_attention.workload import make_workload as make_decode
from pallas_kernels.workload import Prepared

ROUNDS = 4
# 4096 rows: ragged_dot multiplies every row with every expert, and keeps 2 GB for it
PRODUCTS = (
    Product("qwen3-30b-a3b", 4096, 128, 2048, 1536, None),
    Product("qwen3-30b-a3b", 128, 128, 2048, 1536, None),
)
TINY_PRODUCTS = (Product("tiny", 24, 4, 128, 64, None),)
DECODES = (Decode(MODEL_SHAPES[0], 64, 4096),)
TINY_DECODES = (Decode(ModelShape("tiny", 4, 2, 64), 2, 128),)


def run(options: Options) -> Lines:
    """In JAX."""
    method = "wall" if options.is_dry_run else best_method()
    for product in TINY_PRODUCTS if options.is_dry_run else PRODUCTS:
        yield from _guarded(
            partial(_ragged_dot, product, options, method), f"ragged_dot {product.name}", options
        )
    for decode in TINY_DECODES if options.is_dry_run else DECODES:
        yield from _guarded(partial(_cudnn, decode, options, method), f"cudnn {decode.name}", options)


def _guarded(compare: Any, item: str, options: Options) -> Lines:
    if not options.has_time:
        yield skipped(item, "out of time")
        return
    try:
        yield compare()
    except (
        Exception
    ) as error:  # a library that is missing or refuses: others' shortcomings are no failure of ours
        yield skipped(item, f"{type(error).__name__}: {str(error)[:300]}")
    finally:
        if options.is_dry_run:
            reset_interpreter()


def _ragged_dot(product: Product, options: Options, method: str) -> Line:
    workload = make_product(product, options.seed)
    ours = workload.prepare(None, interpret_params(detect_races=False) if options.is_dry_run else None)
    sizes = np.bincount(
        np.random.default_rng(options.seed).integers(0, product.num_experts, product.num_rows),
        minlength=product.num_experts,
    )
    x = jax.random.normal(jax.random.key(0), (product.num_rows, product.k), jnp.bfloat16)
    w = jnp.swapaxes(ours.args[-1], 1, 2)  # [E, K, O]
    links = tuple(jnp.asarray(np.roll(sizes, i), jnp.int32) for i in range(4))
    theirs = Prepared(lambda link, x, w: lax.ragged_dot(x, w, link), links, (x, w), jnp.zeros(1, jnp.int32))
    return _line(f"ragged_dot {product.name}", ours, theirs, method, options)


def _cudnn(decode: Decode, options: Options, method: str) -> Line:
    """Contiguous keys and values with lengths: what a server without pages would keep. On a CPU XLA's own attention."""
    workload = make_decode(decode, options.seed)
    ours = workload.prepare(None, interpret_params(detect_races=False) if options.is_dry_run else None)
    model, rows = decode.model, decode.num_rows
    keys = jax.random.split(jax.random.key(options.seed), 3)
    q = jax.random.normal(keys[0], (rows, 1, model.num_heads, model.head_dim), jnp.bfloat16)
    shape = (rows, decode.kv_len, model.num_kv_heads, model.head_dim)
    k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:])
    implementation = "xla" if options.is_dry_run else "cudnn"

    def attend(link, q, k, v):
        return jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=link, query_seq_lengths=jnp.ones_like(link), implementation=implementation
        )  # fmt: skip

    links = tuple(jnp.roll(ours.args[2], i) for i in range(4))
    theirs = Prepared(attend, links, (q, k, v), jnp.zeros(1, jnp.int32))
    return _line(f"{implementation} attention, {decode.name}", ours, theirs, method, options)


def _line(item: str, ours: Prepared, theirs: Prepared, method: str, options: Options) -> Line:
    rounds = 1 if options.is_dry_run else ROUNDS
    times = measure({"ours": ours, "theirs": theirs}, method, rounds)
    return _compared(item, times["ours"], times["theirs"].median_s, times["theirs"].spread)


def _compared(item: str, ours: Times, theirs_s: float, spread: float) -> Line:
    return {
        "item": item,
        "us": 1e6 * ours.median_s,
        "spread": ours.spread,
        "method": ours.method,
        "their_us": 1e6 * theirs_s,
        "their_spread": spread,
        "times_faster": theirs_s / ours.median_s,
    }


def run_torch(options: Options) -> Lines:
    """torch's grouped matmul at the same shapes, by CUDA events; compare with the lines of `run`."""
    if importlib.util.find_spec("torch") is None:
        yield skipped("torch grouped matmul", "torch is not installed")
        return
    import torch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    if not hasattr(torch, "_grouped_mm"):
        yield skipped("torch grouped matmul", f"torch {torch.__version__} has no _grouped_mm")
        return
    if not torch.cuda.is_available():
        yield skipped("torch grouped matmul", "torch sees no GPU")
        return
    for product in PRODUCTS:
        try:
            yield _torch_line(torch, product, options)
        except Exception as error:  # private to torch, it may refuse these operands
            yield skipped(f"torch {product.name}", f"{type(error).__name__}: {str(error)[:300]}")


def _torch_line(torch: Any, product: Product, options: Options) -> Line:
    rng = np.random.default_rng(options.seed)
    sizes = np.bincount(rng.integers(0, product.num_experts, product.num_rows), minlength=product.num_experts)
    x = torch.randn(product.num_rows, product.k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(product.num_experts, product.outputs, product.k, device="cuda", dtype=torch.bfloat16)
    ends = [torch.tensor(np.cumsum(np.roll(sizes, i)), device="cuda", dtype=torch.int32) for i in range(4)]
    multiply = partial(torch._grouped_mm, x, w.transpose(1, 2))
    for end in ends:
        multiply(offs=end)
    seconds = []
    for _ in range(ROUNDS):
        for end in ends:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)  # the host gets ahead: its launch is not measured
            start.record()
            multiply(offs=end)
            stop.record()
            torch.cuda.synchronize()
            seconds.append(start.elapsed_time(stop) / 1e3)
    median_s = statistics.median(seconds)
    spread = (max(seconds) - min(seconds)) / median_s if median_s else 0.0
    return {
        "item": f"torch {product.name}",
        "their_us": 1e6 * median_s,
        "their_spread": spread,
        "torch": torch.__version__,
    }
