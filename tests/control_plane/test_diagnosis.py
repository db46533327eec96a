"""Each trouble is found when its signs are there and not when one is missing; a patch is one that can be applied."""

from dataclasses import replace
from typing import Any

import pytest

from control_plane.config_document import checked, document
from control_plane.diagnosis import diagnose, expert_imbalance
from control_plane.finding import (
    MIN_WINDOW_S,
    SAMPLE_PERIOD_S,
    WINDOW_S,
    Finding,
    Severity,
    SnapshotHistory,
    Window,
    only_what_helps,
)
from control_plane.ladder_advice import propose
from control_plane.merge_patch import merge
from runtime.config import EngineConfig, parse_config
from runtime.engine.change import LadderChange, LadderState
from runtime.engine.expert_status import ExpertStatus
from runtime.engine.stats import LONG_BOUNDS_S, EngineSnapshot, Histogram
from runtime.schedule.policy import SchedulePolicy
from tests.control_plane.ladders import snapshot_of

CONFIG = parse_config({})


def window_of(*series: EngineSnapshot, seconds: float = 60.0) -> Window:
    return Window(series, seconds)


def found(window: Window, config: EngineConfig = CONFIG) -> dict[str, Finding]:
    """By id; every patch must give a configuration that differs."""
    findings = diagnose(window, config)
    for finding in findings:
        if finding.patch is None:
            assert finding.why_no_patch
        else:
            assert checked(merge(document(config), finding.patch)) != config
    return {finding.id: finding for finding in findings}


def long_times(*seconds: tuple[float, int]) -> Histogram:
    histogram = Histogram(LONG_BOUNDS_S)
    for value, times in seconds:
        histogram.observe(value, times)
    return histogram


QUIET = snapshot_of()


def test_a_quiet_engine_has_no_trouble():
    assert found(window_of(QUIET, replace(QUIET, busy_s=20.0, num_running=4))) == {}


# Expert imbalance

UNEVEN = ((1000, 1000, 1000, 1000), (1000, 900, 800, 400))


@pytest.mark.parametrize(
    ("busy_s", "experts", "is_found"),
    [
        (57.0, UNEVEN, True),
        (50.0, UNEVEN, False),  # nobody is above 90 % busy
        (57.0, ((1000, 900, 800, 510),), False),  # nobody below half
        (57.0, ((100, 90, 80, 40),), False),  # too few tokens to tell
        (57.0, (), False),  # a dense model
        (57.0, ((0, 0, 0, 0), UNEVEN[1]), True),  # a dense layer and one with experts
        (57.0, ((0, 0, 0, 0), (0, 0, 0, 0)), False),
    ],
)
def test_expert_imbalance(busy_s, experts, is_found):
    last = replace(QUIET, busy_s=busy_s, expert_tokens=experts)
    findings = found(window_of(QUIET, last))
    assert ("expert_imbalance:experts" in findings) == is_found
    if is_found:
        finding = findings["expert_imbalance:experts"]
        assert finding.evidence["layer"] == 1
        assert finding.evidence["least_of_busiest"] == pytest.approx(0.4)
        assert (finding.patch, finding.severity) == (None, Severity.INFO)
        assert "one device" in finding.why_no_patch


def test_only_the_window_counts_for_experts():
    first = replace(QUIET, expert_tokens=((100_000, 0),))
    last = replace(QUIET, busy_s=59.0, expert_tokens=((101_000, 1000),))
    assert found(window_of(first, last)) == {}


def test_on_several_devices_routing_leans_to_the_idle_ones():
    parallel = CONFIG.parallel.model_copy(update={"expert_parallel_size": 2})
    config = CONFIG.model_copy(update={"parallel": parallel})  # not built: parse_config would refuse it
    assert list(expert_imbalance(window_of(QUIET, QUIET), config)) == []  # no rows are known

    def served(*rows: int, waiting: int = 0, slots=(0, 1, 2, 3, 0, 1)) -> EngineSnapshot:
        experts = ExpertStatus(
            2, len(slots) // 2, ((), slots), ((0, 0), rows), None, waiting, 0, False, (), "", None
        )
        return replace(QUIET, busy_s=59.0, expert_tokens=((1000, 0, 600, 400),), experts=experts)

    def with_weight(weight: float) -> EngineConfig:
        batching = config.batch_processing.model_copy(update={"expert_balance_weight": weight})
        return config.model_copy(update={"batch_processing": batching})

    even, uneven = window_of(QUIET, served(1000, 900)), window_of(QUIET, served(1000, 450))
    assert list(expert_imbalance(even, config)) == []  # uneven experts, even devices
    (finding,) = expert_imbalance(uneven, with_weight(0.0))
    assert finding.patch == {"batch_processing": {"expert_balance_weight": 0.1}}
    # At its most, as it is by default: faster moves help where moves wait, else nothing that could be set.
    (exhausted,) = expert_imbalance(uneven, config)
    assert exhausted.patch is None
    assert "rebalance" in only_what_helps(exhausted, config).why_no_patch
    moves_wait = window_of(QUIET, served(1000, 450, waiting=3))
    (moving,) = expert_imbalance(moves_wait, config)
    assert moving.patch == {"parallel": {"moves_per_step": 4}}
    # At its bound moves may still wait, and no patch says that they do not.
    at_bound = config.model_copy(update={"parallel": parallel.model_copy(update={"moves_per_step": 1024})})
    (stuck,) = expert_imbalance(moves_wait, at_bound)
    assert stuck.patch is None
    assert "3 moves wait, at 1024 a step" in stuck.why_no_patch
    # Without copies no weight does anything.
    (alone,) = expert_imbalance(window_of(QUIET, served(1000, 450, slots=(0, 1, 2, 3))), with_weight(0.0))
    assert alone.patch is None
    assert "parallel.redundant_experts" in alone.why_no_patch
    # On one device the weight does nothing, so it is not offered.
    one_device = CONFIG.model_copy(update={"batch_processing": with_weight(0.0).batch_processing})
    assert only_what_helps(finding, one_device).patch is None
    assert "nothing to lean to" in only_what_helps(finding, one_device).why_no_patch


# Memory


@pytest.mark.parametrize(
    ("preemptions", "used_pages", "severity"),
    [(3, 10, Severity.CRITICAL), (0, 96, Severity.WARNING), (0, 95, None)],
)
def test_memory_pressure(preemptions, used_pages, severity):
    middle = replace(QUIET, used_pages=used_pages)
    last = replace(QUIET, num_preemptions=preemptions)
    findings = found(window_of(QUIET, middle, last))
    if severity is None:
        assert findings == {}
        return
    finding = findings["memory_pressure:kv_pages"]
    assert finding.severity is severity
    assert finding.patch == {"batch_processing": {"max_batch_size": 24}}
    assert "not built" in finding.expected_effect


def test_memory_pressure_before_the_window_is_history():
    old = replace(QUIET, num_preemptions=7)
    assert found(window_of(old, old)) == {}


def test_a_smaller_batch_shortens_an_explicit_list_of_rungs():
    """max_batch_size alone would be refused: the list would have a larger rung."""
    config = parse_config({"ladder": {"decode_rows": [1, 8, 20, 32]}})
    finding = found(window_of(QUIET, replace(QUIET, num_preemptions=1)), config)["memory_pressure:kv_pages"]
    assert finding.patch == {
        "batch_processing": {"max_batch_size": 24},
        "ladder": {"decode_rows": [1, 8, 20, 24]},
    }


def test_one_row_cannot_be_made_fewer():
    config = parse_config({"batch_processing": {"max_batch_size": 1}})
    finding = found(window_of(QUIET, replace(QUIET, num_preemptions=1)), config)["memory_pressure:kv_pages"]
    assert finding.patch is None


# Latency


def test_latency_swing():
    fast = replace(QUIET, e2e_s=long_times((0.2, 100)))
    slow = replace(QUIET, e2e_s=long_times((0.2, 110), (0.9, 90)))
    finding = found(window_of(QUIET, fast, slow))["latency_swing:e2e_p99"]
    # 0.2 s lies in (0.1, 0.3], 0.9 s in (0.8, 1]: proven is what lies between.
    assert finding.evidence["swing_s"] == pytest.approx(0.5)
    assert finding.patch == {"batch_processing": {"dynamic_adjust_window": "250ms", "micro_batch_size": 32}}


def test_neighbouring_buckets_prove_no_swing():
    fast = replace(QUIET, e2e_s=long_times((0.2, 100)))
    slow = replace(QUIET, e2e_s=long_times((0.2, 110), (0.45, 90)))
    assert found(window_of(QUIET, fast, slow)) == {}


def test_few_requests_have_no_percentile():
    fast = replace(QUIET, e2e_s=long_times((0.2, 100)))
    slow = replace(QUIET, e2e_s=long_times((0.2, 100), (0.9, 99)))
    assert found(window_of(QUIET, fast, slow)) == {}


def test_a_swing_with_everything_done_already_offers_nothing():
    batch = {"dynamic_adjust_window": "30ms", "micro_batch_size": 32, "smoothing": True}
    slow = replace(QUIET, e2e_s=long_times((0.2, 100), (0.9, 100)))
    window = window_of(QUIET, replace(QUIET, e2e_s=long_times((0.2, 100))), slow)
    finding = found(window, parse_config({"batch_processing": batch}))["latency_swing:e2e_p99"]
    assert finding.patch is None
    assert finding.why_no_patch == "what would help is in force already"


# Padding


def padded(hits: int, real: int, demand: dict[int, int]) -> EngineSnapshot:
    rungs = tuple(
        replace(r, hits=hits, real_tokens=real, computed_tokens=32 * hits) if r.name == "decode-32" else r
        for r in QUIET.rungs
    )
    return replace(QUIET, rungs=rungs, demand={"prefill": {}, "decode": demand})


def test_padding_waste_offers_what_was_learned():
    last = padded(2000, 2000 * 25, {25: 2000})
    finding = found(window_of(QUIET, last))["padding_waste:decode"]
    assert finding.evidence["rung"] == "decode-32"
    assert finding.patch == {
        "ladder": {
            "prefill_tokens": list(propose(last, CONFIG).prefill_tokens),
            "decode_rows": list(propose(last, CONFIG).decode_rows),
        }
    }
    assert 25 in propose(last, CONFIG).decode_rows


@pytest.mark.parametrize(("hits", "real_per_hit"), [(99, 25), (2000, 26)])
def test_little_padding_and_rare_rungs_are_no_trouble(hits, real_per_hit):
    assert found(window_of(QUIET, padded(hits, hits * real_per_hit, {25: hits}))) == {}


def test_padding_that_no_ladder_mends_is_told_without_a_patch():
    """Every step asked for all 32 rows; what was lost fell on rows that had ended."""
    finding = found(window_of(QUIET, padded(2000, 2000 * 20, {32: 2000})))["padding_waste:decode"]
    assert finding.patch is None
    assert "ended rows" in finding.why_no_patch


# Window


def waiting(busy_s: float, queue_s: float, window_s: float) -> Window:
    last = replace(
        QUIET,
        busy_s=busy_s,
        queue_s=long_times((queue_s, 50)),
        policy=replace(SchedulePolicy(), batch_window_s=window_s),
    )
    return window_of(QUIET, last)


def test_window_too_long():
    finding = found(waiting(12.0, 0.03, 0.05))["window_too_long:dynamic_batch_window"]
    assert finding.patch == {"batch_processing": {"dynamic_batch_window": "25ms"}}
    assert found(waiting(40.0, 0.03, 0.05)) == {}  # the device is what they wait for
    assert found(waiting(12.0, 0.02, 0.05)) == {}  # they do not wait for the window
    assert found(waiting(12.0, 0.03, 0.0)) == {}  # there is no window


# Rungs


def test_a_failed_rung_is_named_with_its_error():
    rungs = tuple(
        replace(r, state="failed", error="XlaRuntimeError: no memory") if r.size in (28, 32) else r
        for r in QUIET.rungs
    )
    findings = found(window_of(QUIET, replace(QUIET, rungs=rungs)))
    assert findings["rung_missing:decode-32"].severity is Severity.CRITICAL  # the largest: steps are cut
    assert findings["rung_missing:decode-28"].severity is Severity.WARNING
    assert "no memory" in findings["rung_missing:decode-28"].symptom
    assert next(iter(findings)) == "rung_missing:decode-32"  # the most severe first


def test_rungs_that_compile_are_no_trouble_and_a_failed_change_is():
    rungs = tuple(replace(r, state="absent") if r.size == 28 else r for r in QUIET.rungs)
    compiling = replace(QUIET, rungs=rungs, ladder_change=LadderChange(1, LadderState.COMPILING))
    assert found(window_of(QUIET, compiling)) == {}
    failed = replace(QUIET, ladder_change=LadderChange(1, LadderState.FAILED, error="decode-9: no memory"))
    assert "decode-9" in found(window_of(QUIET, failed))["rung_missing:the_ladder"].symptom
    assert "rung_missing:decode-28" in found(window_of(QUIET, replace(QUIET, rungs=rungs)))


FULL = replace(QUIET, num_running=32, num_waiting=5)


@pytest.mark.parametrize(
    ("sections", "patch"),
    [
        ({"ladder": {"row_slots": 48}}, {"batch_processing": {"max_batch_size": 48}}),
        ({"ladder": {"row_slots": 128}}, {"batch_processing": {"max_batch_size": 64}}),
        ({}, None),  # the device has no room for more
        (
            {"ladder": {"row_slots": 48, "decode_rows": [1, 32]}},
            {"batch_processing": {"max_batch_size": 48}, "ladder": {"decode_rows": [1, 32, 48]}},
        ),
        (
            {"batch_processing": {"max_batch_size": 40}, "ladder": {"decode_rows": [1, 32]}},
            {"ladder": {"decode_rows": [1, 32, 40]}},
        ),
    ],
)
def test_a_queue_before_full_rows_asks_for_more_rows(sections, patch):
    finding = found(window_of(FULL, FULL), parse_config(sections))["rung_missing:decode_rows"]
    assert finding.patch == patch


@pytest.mark.parametrize(
    "change",
    [{"num_waiting": 0}, {"num_running": 30}, {"used_pages": 96}],
    ids=["no queue", "free rows", "no pages"],
)
def test_more_rows_would_not_help(change: dict[str, Any]):
    window = window_of(FULL, replace(FULL, **change), FULL)
    assert "rung_missing:decode_rows" not in found(window, parse_config({"ladder": {"row_slots": 64}}))


# History


def test_history_keeps_a_window_that_ends_now():
    history = SnapshotHistory()
    for second in range(int(WINDOW_S) + 61):
        history.add(float(second), replace(QUIET, num_steps=second))
    window = history.window()
    assert window is not None
    assert window.last.num_steps == int(WINDOW_S) + 60
    assert WINDOW_S - SAMPLE_PERIOD_S <= window.seconds <= WINDOW_S
    assert len(window.series) <= WINDOW_S / SAMPLE_PERIOD_S + 2


def test_no_window_in_the_first_seconds():
    history = SnapshotHistory()
    assert history.window() is None
    history.add(0.0, QUIET)
    history.add(MIN_WINDOW_S - 0.1, QUIET)
    assert history.window() is None
    history.add(MIN_WINDOW_S, QUIET)
    assert history.window() == Window((QUIET, QUIET, QUIET), MIN_WINDOW_S)
