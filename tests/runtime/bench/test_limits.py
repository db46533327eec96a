from runtime.bench.limits import product_gflops, read_gbps


def test_rates_are_positive_and_possible() -> None:
    assert 0.1 < read_gbps(num_mib=16, repeats=2) < 5000
    assert 0.01 < product_gflops("float32", size=64, repeats=2) < 1e6
