import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from runtime.bench import running, sweep, sweep_plots, sweep_report
from runtime.bench.limits import MachineLimits
from runtime.bench.report import write_json
from runtime.bench.sweep_measure import DecodeSample, Round, Window
from runtime.bench.sweep_plan import clip_batches, make_plan, overrides_for
from runtime.bench.sweep_recommend import PrefillShape, max_batch, recommend, step_s_at, to_yaml, useful_rows
from runtime.bench.sweep_summary import add_recommendation, summarise
from runtime.bench.sweep_zones import BatchPoint, find_zones
from runtime.config import load_config
from tests.runtime.bench.fake_loop import SHAPE
from tests.runtime.bench.test_sweep_zones import REFERENCE

MODEL = replace(SHAPE, max_context=2048)
SHAPES = [PrefillShape(32, 32, 900.0), PrefillShape(8, 128, 1000.0), PrefillShape(16, 64, 960.0)]


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)
    return parser.parse_args(argv)


def a_round(scale: float) -> Round:
    decode = {
        p.batch: DecodeSample(Window(p.step_s * scale * 10, p.batch * 10, 10), p.step_s * 70)
        for p in REFERENCE
    }
    shapes = {(n, 1024 // n): 1.0 / n**0.5 for n in (64, 32, 16, 8, 4, 2, 1)}
    return Round(decode, shapes, {n: n * 1e-3 for n in (16, 17, 128, 129, 256, 257)})


@pytest.fixture
def result() -> dict:
    """A whole result of three made-up rounds: the published table, at 1, 2 and 4 times the time."""
    plan = make_plan([p.batch for p in REFERENCE], 128, 64, 3, MODEL.max_context)
    config = running.config_of(parse(), overrides_for(plan, MODEL, "bf16"))
    rounds = [a_round(scale) for scale in (1.0, 2.0, 4.0)]
    limits = [MachineLimits(1e-3, 1e-2, 5e-3), *[MachineLimits(3e-3, 3e-2, 15e-3)] * 3]
    found = summarise(plan, MODEL, config, rounds, limits, MODEL.max_context)
    found |= {"command": "sweep", "model": "fake", "late_compiles": 0}
    found |= {"machine": {"cpu": "a cpu", "cores": 2, "jax": "0.0", "taken": "2026-01-02T03:04:05Z"}}
    found["warm_up"] = {
        "prefill": [
            {
                "rung": "prefill-16x1",
                "first_ms": 9.0,
                "later_ms": 1.0,
                "compile_s": 0.5,
                "is_from_cache": False,
            }
        ],
        "decode_after": [{"batch": 8, "first_ms": 9.0, "later_ms": 1.0}],
    }
    add_recommendation(found, itl_s=1.0)
    return found


def test_medians_over_rounds_and_each_round_against_its_own_limits(result: dict) -> None:
    one = result["decode"][0]
    assert one["step_ms"] == 90  # the middle round
    assert one["tokens_s"] == pytest.approx(1 / 0.09, abs=0.05)
    assert one["rounds"] == [22.2, 11.1, 5.6]
    # rates fall by half each round while the limits go 2, 3, 3 MB/s: shares 22.2/2, 11.1/3, 5.6/3 and their median
    whole = median_share(one["rounds"], (2e-3, 3e-3, 3e-3))
    assert one["memory_share"] == pytest.approx(whole, rel=0.02)
    assert one["utilisation"] == max(one["memory_share"], one["compute_share"])


def median_share(rates: list[float], gbps: tuple[float, ...]) -> float:
    num_bytes = 2 * (MODEL.read(MODEL.distinct_experts(1)) + (128 + 32) * MODEL.num_layers * 2 * MODEL.kv_dim)
    return sorted(r * num_bytes / 1e9 / g for r, g in zip(rates, gbps, strict=True))[1]


def test_padding_is_stated_at_a_boundary_and_above(result: dict) -> None:
    padded = {c["length"]: (c["rung_tokens"], c["padding_percent"]) for c in result["alignment"]}
    assert padded[16] == (16, 0.0)
    assert padded[17] == (32, 46.9)
    assert padded[128] == (128, 0.0)
    assert padded[129][0] > 144


def test_the_result_can_be_printed_written_and_drawn(
    result: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_report.show(result)
    printed = capsys.readouterr().out
    assert "small until 8, large from 128" in printed
    write_json(tmp_path / "sweep.json", result)
    again = json.loads((tmp_path / "sweep.json").read_text())
    assert [s["zone"] for s in again["zones"]["steps"]] == ["small", "fair", "large", "fair", "large"]
    written = sweep_plots.draw(again, tmp_path / "plots")
    assert [p.name for p in written] == ["batch.png", "prefill.png", "warm_up.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size < 100_000 for p in written)


def test_without_limits_there_is_no_utilisation_rather_than_a_wrong_one(tmp_path: Path) -> None:
    plan = make_plan([1, 8], 128, 64, 1, MODEL.max_context)
    config = running.config_of(parse(), overrides_for(plan, MODEL, "bf16"))
    found = summarise(plan, MODEL, config, [a_round(1.0)], [None, None], MODEL.max_context)
    assert [c["utilisation"] for c in found["decode"]] == [None, None]


def test_the_recommendation_loads_and_says_what_it_rests_on(tmp_path: Path) -> None:
    found = recommend(REFERENCE, SHAPES, itl_s=0.44, prefill_step=512)
    path = tmp_path / "recommended.yaml"
    path.write_text(to_yaml(found, "Measured somewhere."))
    config = load_config(path)
    batch = config.batch_processing
    assert (batch.base_batch_size, batch.max_batch_size) == (32, 128)  # latency outgrows tokens/s from 32 on
    assert (batch.micro_batch_size, batch.max_micro_batch_size) == (16, 32)
    assert batch.dynamic_adjust_window == 0.5  # twenty steps of 210 ms, clipped
    assert batch.dynamic_batch_window == 0.05
    assert config.ladder.row_slots == 256
    assert config.ladder.decode_rows[-1] == 128
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        if line.startswith("  ") and not line.strip().startswith("#"):
            assert lines[i - 1].strip().startswith("# "), f"no reason above {line}"


def test_the_promise_and_the_flat_zone_bound_the_batch() -> None:
    zones = find_zones(REFERENCE)
    assert max_batch(REFERENCE, zones, 0.2).batch == 8
    assert max_batch(REFERENCE, zones, 10.0).batch == 256
    assert max_batch(REFERENCE, zones, 0.001).batch == 1
    flat = [BatchPoint(1, 0.01, 100), BatchPoint(8, 0.02, 400), BatchPoint(16, 0.04, 400)]
    assert max_batch(flat, find_zones(flat), 1.0).batch == 8


def test_rungs_that_save_no_time_are_left_out() -> None:
    flat_then_linear = [BatchPoint(1, 0.010, 100), BatchPoint(8, 0.010, 800), BatchPoint(32, 0.040, 800)]
    rows = useful_rows(flat_then_linear, 32)
    assert rows[0] == 8
    assert rows[-1] == 32
    assert len(rows) > 2


@given(
    st.lists(st.floats(1e-4, 10), min_size=6, max_size=6).map(sorted),
    st.floats(1e-3, 20),
    st.lists(st.floats(1, 1e6), min_size=3, max_size=3),
)
def test_any_sweep_gives_a_configuration_that_loads(
    steps: list[float], itl_s: float, rates: list[float]
) -> None:
    points = [
        BatchPoint(p.batch, step_s, p.batch / step_s) for p, step_s in zip(REFERENCE, steps, strict=True)
    ]
    shapes = [replace(s, tokens_s=rate) for s, rate in zip(SHAPES, rates, strict=True)]
    found = recommend(points, shapes, itl_s, 512)
    assert found.base_batch_size <= found.max_batch_size <= found.row_slots
    assert found.micro_batch_size <= found.max_micro_batch_size <= found.max_batch_size
    for rows in (1, 5, 300):
        assert steps[0] <= step_s_at(points, rows) <= steps[-1]
    from runtime.config import parse_config

    parse_config(yaml.safe_load(to_yaml(found, "x")))


def test_sizes_that_do_not_fit_are_clipped_and_none_is_an_error() -> None:
    weights = 2 * (MODEL.read(MODEL.num_experts) + MODEL.head)
    row = (128 + 64 + 16) * MODEL.num_layers * 2 * MODEL.kv_dim * 2 + 16 * MODEL.vocab_size
    memory = int((weights + 10 * row) / 0.8)
    assert clip_batches((1, 8, 32), 128, 64, MODEL, memory, "bf16") == (1, 8)
    assert clip_batches((1, 8, 32), 128, 64, MODEL, 1 << 40, "bf16") == (1, 8, 32)
    with pytest.raises(ValueError, match="no batch size of"):
        clip_batches((1, 8), 128, 64, MODEL, 1000, "bf16")


def test_the_configuration_has_a_rung_for_every_size_and_room_for_every_case() -> None:
    plan = make_plan((1, 8, 256), 128, 64, 3, MODEL.max_context)
    config = running.config_of(
        parse("--set", "ladder.max_prefill_rows=32"), overrides_for(plan, MODEL, "bf16")
    )
    assert config.ladder.decode_rows == (1, 8, 256)
    assert config.ladder.max_prefill_rows == 32
    assert not config.kv_cache.enable_prefix_cache
    assert not config.batch_processing.enable_dynamic_batch
    positions = config.kv_cache.kv_cache_size.of(0) / (MODEL.num_layers * 2 * MODEL.kv_dim * 2)
    assert positions >= 256 * (128 + plan.new_tokens(256))
    assert plan.longest < config.model.max_context <= MODEL.max_context


@pytest.mark.parametrize(
    ("output", "rounds", "context", "message"),
    [(8, 3, 2048, "--output of 16"), (64, 0, 2048, "--rounds"), (64, 3, 160, "the model has 160")],
)
def test_plans_that_cannot_be_measured_are_refused(
    output: int, rounds: int, context: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan((1, 8), 128, output, rounds, context)


@pytest.mark.parametrize("text", ["0,8", "a", "", "5000"])
def test_wrong_sizes_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--batch", text)
    assert "numbers from 1 to 4096" in capsys.readouterr().err


def test_a_missing_matplotlib_is_said_before_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match="pip install matplotlib"):
        sweep.run(parse("--plots", str(tmp_path)))
