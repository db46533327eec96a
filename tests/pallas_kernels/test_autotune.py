"""Tuning: refuses a CPU, drops wrong tiles however fast, keeps the suggestion within noise, writes what the op reads."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import autotune
from pallas_kernels.autotune import Candidate, choose, sweep, write_entry
from pallas_kernels.device_time import Times
from pallas_kernels.grouped_matmul.tiles import TileConfig, choose_tile
from pallas_kernels.paged_attention.kernel import DecodeTiles, choose_decode_tiles
from pallas_kernels.tuning import TileTables
from pallas_kernels.workload import Prepared, Workload


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert autotune.main(["grouped_matmul"]) == 2
    assert "needs a GPU, the default device is cpu" in capsys.readouterr().out


def prepare(fields: Mapping[str, int] | None, interpret: object) -> Prepared:
    """Field `plus` is what the "kernel" is wrong by; 9 does not compile."""
    plus = (fields or {})["plus"]
    if plus == 9:
        raise NotImplementedError("no such tile")
    x = jnp.ones((4, 4)).at[0, 0].add(jnp.nan if plus == 8 else plus)
    return Prepared(lambda link, x: x, (jnp.zeros(1, jnp.int32),), (x,), jnp.arange(4))


WORKLOAD = Workload(
    "w", "op", "key", {"plus": 0}, ({"plus": 0}, {"plus": 1}, {"plus": 8}, {"plus": 9}), prepare,
    lambda: np.ones((4, 4)), 1, 1,
)  # fmt: skip


def test_wrong_tiles_are_not_timed() -> None:
    found = {c.fields["plus"]: c for c in sweep(WORKLOAD, WORKLOAD.candidates, "wall", None)}
    assert found[0].times is not None
    assert all(found[plus].times is None for plus in (1, 8, 9))
    assert "1 of 16 values are wrong" in found[1].why_not
    assert "1 of 16 values are wrong" in found[8].why_not
    assert "NotImplementedError: no such tile" in found[9].why_not


def timed(microseconds: float) -> Candidate:
    return Candidate({"us": int(microseconds)}, Times("wall", (microseconds * 1e-6,)))


def test_the_suggestion_stays_unless_something_is_clearly_faster() -> None:
    suggested, close, fast = timed(100), timed(99), timed(90)
    assert choose(WORKLOAD, [suggested, close]) is suggested
    assert choose(WORKLOAD, [suggested, close, fast]) is fast
    assert choose(WORKLOAD, [Candidate({}, None, "wrong"), close]) is close
    assert choose(WORKLOAD, [Candidate({}, None, "wrong")]) is None


def test_entries_are_added_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "dev" / "op.json"
    write_entry(path, "Dev", WORKLOAD, timed(5))
    write_entry(path, "Dev", replace(WORKLOAD, key="other"), timed(6))
    write_entry(path, "Dev", WORKLOAD, timed(7))
    table = json.loads(path.read_text())
    assert table["tiles"] == {"key": {"us": 7}, "other": {"us": 6}}
    assert table["measured_us"] == {"key": 7.0, "other": 6.0}
    assert TileTables(tmp_path, "dev").look_up("op", "key") == {"us": 7}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.slow
def test_a_dry_run_writes_a_table_that_the_ops_read(tmp_path: Path) -> None:
    for op in ("grouped_matmul", "paged_attention"):
        only = "silu" if op == "grouped_matmul" else "tiny"
        arguments = [op, "--dry-run", "--folder", str(tmp_path), "--only", only]
        assert autotune.main(arguments) == 0
    tables = TileTables(tmp_path, "cpu")
    assert isinstance(choose_tile(24, 4, 128, 64, is_gated=True, tables=tables), TileConfig)
    assert isinstance(choose_decode_tiles(2, 2, 128, 64, tables), DecodeTiles)
    assert tables.misses() == {}


def test_numbers_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        autotune.main(["grouped_matmul", "--seconds", "inf"])
    assert "'inf'" in capsys.readouterr().err
