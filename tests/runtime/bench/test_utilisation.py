import pytest

from runtime.bench.limits import MachineLimits
from runtime.bench.roofline import BYTES, decode_bound, prefill_bound
from runtime.bench.utilisation import decode_utilisation, prefill_utilisation
from tests.runtime.bench.fake_loop import SHAPE

LIMITS = MachineLimits(read_gbps=0.01, bf16_gflops=0.02, f32_gflops=0.01)


def test_the_shares_are_bytes_and_operations_over_the_limits() -> None:
    rows, context, tokens_s = 4, 100, 50.0
    steps_s = tokens_s / rows
    kv = rows * context * SHAPE.num_layers * 2 * SHAPE.kv_dim
    num_bytes = (SHAPE.read(SHAPE.distinct_experts(rows)) + kv) * BYTES["bf16"]
    flops = 2 * rows * SHAPE.active + 4 * rows * context * SHAPE.num_layers * SHAPE.query_dim
    used = decode_utilisation(SHAPE, rows, context, tokens_s, LIMITS, "bf16")
    assert used.memory == pytest.approx(steps_s * num_bytes / 0.01e9, rel=1e-3)
    assert used.compute == pytest.approx(steps_s * flops / 0.02e9, rel=1e-3)
    assert used.value == max(used.memory, used.compute)


@pytest.mark.parametrize(("rows", "limited_by"), [(1, "memory"), (256, "compute")])
def test_at_the_bound_utilisation_is_one(rows: int, limited_by: str) -> None:
    bound = decode_bound(SHAPE, rows, 64, LIMITS)
    used = decode_utilisation(SHAPE, rows, 64, bound.tokens_s, LIMITS, "bf16")
    assert used.value == pytest.approx(1)
    assert used.limited_by == bound.limited_by == limited_by
    bound = prefill_bound(SHAPE, 64, rows, LIMITS)
    assert prefill_utilisation(SHAPE, 64, rows, bound.tokens_s, LIMITS, "bf16").value == pytest.approx(1)


def test_half_the_rate_is_half_the_utilisation_however_busy() -> None:
    whole = decode_utilisation(SHAPE, 8, 64, 200.0, LIMITS, "fp32")
    half = decode_utilisation(SHAPE, 8, 64, 100.0, LIMITS, "fp32")
    assert half.value == pytest.approx(whole.value / 2)


def test_without_a_matrix_rate_memory_is_all_there_is() -> None:
    used = decode_utilisation(SHAPE, 8, 64, 200.0, MachineLimits(read_gbps=0.01), "bf16")
    assert used.compute == 0
    assert used.limited_by == "memory"
