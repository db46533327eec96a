import json
from pathlib import Path

import pytest

from runtime.bench.report import machine_stamp, percentile, print_table, spread_percent, summary, write_json


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile(list(range(101)), 90) == 90
    assert summary([1.0, 2.0, 3.0]) == {"n": 3, "mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98}
    assert summary([])["p99"] is None
    assert spread_percent([90.0, 100.0, 120.0]) == 30.0


def test_a_stamp_names_the_machine_and_no_folder() -> None:
    stamp = machine_stamp()
    assert stamp["cores"] >= 1
    assert stamp["jax"]
    assert "/" not in json.dumps(stamp)


def test_a_result_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


def test_a_table_shows_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("title", ("a", "b"), [("x", 1.23456), ("y", None)])
    text = capsys.readouterr().out
    assert all(part in text for part in ("title", "1.235", "-", "x", "y"))
