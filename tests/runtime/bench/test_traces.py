import gzip
from pathlib import Path

import pytest

from runtime.bench.traces import TraceRequest, fitting_factor, read_trace, scale_lengths, spread_equal_times


def test_azure_format(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"t_s,prompt_tokens,output_tokens\n0.0,374,44\n4.3146,396,109\n5.0,1,1\n"))
    assert read_trace(path, 2) == [TraceRequest(0.0, 374, 44), TraceRequest(4.3146, 396, 109)]


def test_mooncake_format(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"timestamp":3000,"input_length":600,"output_length":5,"hash_ids":[0,7]}\n')
    assert read_trace(path) == [TraceRequest(3.0, 600, 5, (0, 7))]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.csv", "t,x\n1,2\n"), ("a.csv", ""), ("a.jsonl", "{}\n"), ("a.jsonl", "nonsense\n"), ("a.txt", "1")],
)
def test_anything_else_is_one_clear_error(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        read_trace(tmp_path / name)


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"t_s,prompt_tokens,output_tokens\n" + b"0.0,374,44\n" * 999)[:-20])
    with pytest.raises(ValueError, match="not a trace"):
        read_trace(path)


def test_equal_stamps_spread_up_to_the_next_one() -> None:
    requests = [TraceRequest(t, 1, 1) for t in (0.0, 0.0, 0.0, 3.0, 6.0, 6.0)]
    assert [r.t_s for r in spread_equal_times(requests)] == [0.0, 1.0, 2.0, 3.0, 6.0, 7.5]


def test_one_factor_fits_the_longest_request() -> None:
    requests = [TraceRequest(0.0, 3000, 1000), TraceRequest(1.0, 100, 3)]
    factor = fitting_factor(requests, 1000)
    assert factor == 0.25
    assert [(r.prompt_len, r.output_len) for r in scale_lengths(requests, factor, 1000)] == [
        (750, 250),
        (25, 1),
    ]
    assert fitting_factor(requests, 10_000) == 1.0


def test_a_factor_that_leaves_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the context of 100"):
        scale_lengths([TraceRequest(0.0, 300, 10)], 0.5, 100)
