"""Comparisons that must not be lenient, bounds, and real shapes whose candidates all fit."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.cases import PRODUCTS, Product
from pallas_kernels.grouped_matmul.tiles import TileConfig
from pallas_kernels.grouped_matmul.workload import _candidates
from pallas_kernels.interpret import interpret_params
from pallas_kernels.paged_attention.kernel import DecodeTiles, choose_decode_tiles, decode_key
from pallas_kernels.tunable import OPS, shapes_in_turn
from pallas_kernels.tuning import TileTables
from pallas_kernels.workload import compare


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1.5])
@pytest.mark.parametrize("place", [0, 7])
def test_one_wrong_value_is_found(wrong: float, place: int) -> None:
    expected = np.ones((2, 4), np.float32)
    actual = expected.copy()
    actual.reshape(-1)[place] = wrong
    errors = compare(actual, expected)
    assert errors.num_wrong == 1
    assert not errors.is_right


@given(st.lists(st.floats(-100, 100), min_size=1), st.floats(-0.019, 0.019))
def test_a_rounding_is_right_and_five_percent_are_not(values: list[float], change: float) -> None:
    expected = np.array(values, np.float32)
    assert compare(expected * np.float32(1 + change), expected).is_right
    off = expected + 0.05 * (1 + np.abs(expected))
    assert compare(off, expected).num_wrong == len(values)


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ValueError, match=r"\(2,\), expected \(3,\)"):
        compare(np.zeros(2), np.zeros(3))


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: p.name)
def test_every_candidate_fits_its_product(product: Product) -> None:
    tiles = list(_candidates(product))
    assert len(tiles) == len(set(tiles)) > 2
    for tile in tiles:
        tile.check(product.k, product.outputs, is_gated=product.gate is not None)


def test_shapes_take_turns_and_none_is_left_out() -> None:
    names = [shape.name for _, shape in shapes_in_turn(is_tiny=False)]
    assert {name.split("/")[0] for name in names[: len(OPS)]} == set(OPS)
    assert sorted(names) == sorted(shape.name for op in OPS.values() for shape in op.shapes)


@pytest.mark.parametrize("op", OPS)
def test_a_workload_takes_its_own_candidates(op: str) -> None:
    for shape in OPS[op].tiny:
        workload = OPS[op].make(shape, 0)
        assert workload.op == op
        for fields in (None, workload.default, workload.candidates[0]):
            prepared = workload.prepare(fields, interpret_params())
            assert len(prepared.links) > 1
            assert prepared.links[0].dtype == np.int32
        assert workload.expected().shape[0] == prepared.sampled.shape[0]


def test_bytes_and_operations_of_a_product() -> None:
    workload = OPS["grouped_matmul"].make(Product("tiny", 24, 4, 128, 64, None), 0)
    assert workload.num_flops == 2 * 24 * 64 * 128
    assert workload.num_bytes == 2 * (4 * 64 * 128 + 24 * (128 + 64))  # 24 rows hit all four experts
    memory_s, by = workload.bound_s(1e6, 1e15)
    assert (memory_s, by) == (workload.num_bytes / 1e6, "memory")
    assert workload.bound_s(1e15, 1e6) == (workload.num_flops / 1e6, "compute")


def test_a_table_decides_the_tiles_of_decode_attention(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    key = decode_key(60, 4, 4000, 128)
    assert key == decode_key(64, 4, 4096, 128)
    (tmp_path / "d" / "paged_attention.json").write_text(
        '{"tiles": {"%s": {"splits": 7, "steps": 2}}}' % key  # noqa: UP031 - braces
    )
    tables = TileTables(tmp_path, "d")
    assert choose_decode_tiles(60, 4, 4000, 128, tables) == DecodeTiles(7, 2)
    assert dataclasses.asdict(TileConfig(8, 64))["swap"] is False
