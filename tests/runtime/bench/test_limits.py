from runtime.bench.limits import product_gflops, read_gbps, significant


def test_rates_are_positive_and_possible() -> None:
    assert 0 < read_gbps(num_mib=16, repeats=2) < 5000
    assert 0 < product_gflops("float32", size=64, repeats=2) < 1e6


def test_a_rate_is_short_and_never_zero() -> None:
    assert [significant(rate) for rate in (1234.56, 12.3456, 0.00123456)] == [1235, 12.35, 0.001235]
