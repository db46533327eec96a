"""The Mosaic kernel in the interpreter: right numbers, no races, and planted bugs that show."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.interpret import interpret_params, races_found
from pallas_kernels.paged_attention import kernel, tiles
from pallas_kernels.paged_attention.cases import CASES, Case, make_inputs
from pallas_kernels.paged_attention.kernel import (
    DecodeTiles,
    choose_decode_tiles,
    paged_attention_mosaic,
)
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.tuning import TileTables

# Those that the interpreter takes a second or two for; the others differ from them in nothing that the kernel sees.
INTERPRETED = [
    case
    for case in CASES
    if case.name
    not in {
        "one row of one key",
        "no keys at all",
        "even",
        "pages of 32",
        "soft cap",
        "a head for each kv head",
    }
]


def forget_compiled() -> None:
    """A kernel is traced once for its shapes; a planted bug must neither miss that nor stay in it."""
    getattr(kernel._decode, "clear_cache")()  # noqa: B009


@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
def test_equals_reference_without_a_race(case: Case) -> None:
    """Outputs and shared memory begin as NaN in the interpreter, so what is not written shows."""
    inputs = make_inputs(case)
    out = paged_attention_mosaic(**inputs, tiles=DecodeTiles(2, 2), interpret=interpret_params())
    want = np.asarray(paged_attention_reference(**inputs))
    assert not races_found()
    np.testing.assert_allclose(out, want, atol=0.01)  # queries and weights are rounded to bfloat16


@pytest.mark.parametrize("tiles_", [DecodeTiles(1, 1), DecodeTiles(3, 3)], ids=str)
def test_splits_and_steps_do_not_change_the_result(
    tiles_: DecodeTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five tiles over three splits of at least one: 2, 2, 1; and one split that has nothing to do."""
    monkeypatch.setattr(kernel, "MIN_TILES_A_SPLIT", 1)
    case = Case("splits", (300, 90), num_heads=2, num_kv_heads=1, pages_a_row=5, has_sinks=True)
    inputs = make_inputs(case)
    out = paged_attention_mosaic(**inputs, tiles=tiles_, interpret=interpret_params())
    assert not races_found()
    np.testing.assert_allclose(out, np.asarray(paged_attention_reference(**inputs)), atol=0.01)


class Without:
    """A module in which some functions do nothing."""

    def __init__(self, module: Any, *names: str) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        return (lambda *_, **__: None) if name in self._names else getattr(self._module, name)


def is_noticed(call: Callable[[], jax.Array]) -> bool:
    """By an error (jax 0.12 raises on a race) or by the report of a race."""
    try:
        jax.block_until_ready(call())
    except (TypeError, AttributeError):  # of the planting itself
        raise
    except Exception:
        return True
    return races_found()


@pytest.mark.parametrize(
    ("module", "missing"),
    [(tiles, "barrier_wait"), (kernel, "commit_smem"), (kernel, "wait_smem_to_gmem")],
)
def test_a_missing_wait_is_noticed(module: Any, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "plgpu", Without(module.plgpu, missing))
    forget_compiled()
    inputs = make_inputs(Case("planted", (100,), num_heads=1, num_kv_heads=1))
    tile = DecodeTiles(1, 2)
    assert is_noticed(lambda: paged_attention_mosaic(**inputs, tiles=tile, interpret=interpret_params()))
    forget_compiled()


def test_two_writers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two kv heads that both store to the first."""
    to_first = {"kv_head": 0}
    axis_index = jax.lax.axis_index
    monkeypatch.setattr(kernel.lax, "axis_index", lambda name: to_first.get(name, axis_index(name)))
    forget_compiled()
    inputs = make_inputs(Case("planted", (60,), num_heads=2))
    tile = DecodeTiles(1, 2)
    assert is_noticed(lambda: paged_attention_mosaic(**inputs, tiles=tile, interpret=interpret_params()))
    forget_compiled()


def test_tiles_fill_the_cores_but_splits_do_not_get_short(tmp_path: Any) -> None:
    tables = TileTables(tmp_path, "none")
    assert choose_decode_tiles(1, 4, 8192, 128, tables) == DecodeTiles(32, 2)
    assert choose_decode_tiles(64, 4, 8192, 128, tables) == DecodeTiles(2, 2)
    assert choose_decode_tiles(256, 8, 8192, 128, tables) == DecodeTiles(1, 2)
    assert choose_decode_tiles(1, 8, 512, 64, tables) == DecodeTiles(2, 3)
    assert tables.misses()["paged_attention", "rows=1,kv_heads=4,keys=8192,head_dim=128"] == 1


def test_measured_tiles_are_preferred(tmp_path: Any) -> None:
    (tmp_path / "card").mkdir()
    text = '{"tiles": {"rows=64,kv_heads=4,keys=8192,head_dim=128": {"splits": 5, "steps": 4}}}'
    (tmp_path / "card" / "paged_attention.json").write_text(text)
    assert choose_decode_tiles(40, 4, 5000, 128, TileTables(tmp_path, "card")) == DecodeTiles(5, 4)


def test_tiles_out_of_bounds_are_named() -> None:
    with pytest.raises(ValueError, match=r"splits must be in \[1, 32\]"):
        DecodeTiles(33)
    inputs = make_inputs(Case("large", (1,), head_dim=256))
    with pytest.raises(ValueError, match="4 steps of 64 keys of 256 need 295936 bytes of shared memory"):
        paged_attention_mosaic(**inputs, tiles=DecodeTiles(1, 4), interpret=interpret_params())


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a Hopper GPU")
def test_equals_reference_on_the_gpu() -> None:
    for case in CASES:
        inputs = make_inputs(case)
        out = paged_attention_mosaic(**inputs)
        with jax.default_matmul_precision("highest"):
            want = np.asarray(paged_attention_reference(**inputs))
        np.testing.assert_allclose(out, want, atol=0.01, err_msg=case.name)
