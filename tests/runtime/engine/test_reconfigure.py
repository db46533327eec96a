"""A plan says what a change would do, and does nothing."""

import pytest

from runtime.config import EngineConfig, parse_config
from runtime.engine.change import ChangeKind
from runtime.engine.reconfigure import (
    WITHOUT_EFFECT,
    Envelope,
    diff_fields,
    kind_of,
    plan_change,
    with_restart_fields_of,
)
from runtime.errors import InvalidRequest
from runtime.ladder.ladder import BucketLadder
from runtime.ladder.learned import RungCost

BASE = {
    "ladder": {"decode_rows": [1, 4, 8], "prefill_tokens": [16, 64]},
    "batch_processing": {"max_batch_size": 8},
}
ENVELOPE = Envelope(row_slots=8, max_prefill_tokens=64, max_context=256)


def config(**changes) -> EngineConfig:
    """BASE with dotted fields changed."""
    data = {name: dict(fields) for name, fields in BASE.items()}
    for path, value in changes.items():
        section, name = path.split("__")
        data.setdefault(section, {})[name] = value
    return parse_config(data)


def plan(**changes):
    old = config()
    ladder = BucketLadder.from_config(old, 256)
    return plan_change(old, config(**changes), ladder, ENVELOPE, lambda b: RungCost(2.0, 100 * b.tokens))


def test_nothing_differs():
    change = plan()
    assert (change.fields, change.rungs_to_add, change.compile_s, change.warnings) == ((), (), 0.0, ())


def test_each_field_with_its_kind_and_its_values_as_written():
    change = plan(batch_processing__alpha=0.7, slo__itl="20ms", server__port=9)
    assert [(f.path, f.kind, f.old, f.new) for f in change.fields] == [
        ("server.port", ChangeKind.RESTART, 8000, 9),
        ("batch_processing.alpha", ChangeKind.LIVE, 0.5, 0.7),
        ("slo.itl", ChangeKind.LIVE, "100ms", "20ms"),
    ]
    assert change.warnings == ("server.port takes effect when the server is started again",)


def test_rungs_to_add_and_drop_with_their_price():
    change = plan(ladder__decode_rows=[1, 6, 7, 8], ladder__compile_workers=1)
    assert (change.rungs_to_add, change.rungs_to_drop) == (("decode-6", "decode-7"), ("decode-4",))
    assert (change.compile_s, change.temp_bytes) == (2.0, 700)  # two workers until the restart


def test_a_smaller_ceiling_drops_what_is_above_it():
    change = plan(batch_processing__max_batch_size=4, ladder__decode_rows=[1, 4])
    assert change.rungs_to_drop == ("decode-8",)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"batch_processing__max_batch_size": 9}, "batch_processing.max_batch_size"),
        ({"ladder__prefill_tokens": [16, 80]}, "ladder.prefill_tokens"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, param):
    with pytest.raises(InvalidRequest, match="until ladder") as info:
        plan(**changes)
    assert info.value.param == param


def test_restart_fields_stay_as_they_are():
    old, new = config(), config(server__port=9, batch_processing__alpha=0.7, kv_cache__page_size=32)
    held = with_restart_fields_of(old, new)
    assert (held.server.port, held.kv_cache.page_size, held.batch_processing.alpha) == (8000, 16, 0.7)
    assert not diff_fields(old, with_restart_fields_of(old, config(server__port=9)))


def test_a_change_that_only_a_restart_could_carry_is_refused():
    old = config(ladder__row_slots=8)
    new = config(ladder__row_slots=16, batch_processing__max_batch_size=16)
    with pytest.raises(
        InvalidRequest, match=r"not without a restart: batch_processing\.max_batch_size is 16"
    ):
        with_restart_fields_of(old, new)


def test_a_ceiling_that_no_rung_reaches_is_warned_of():
    (warning,) = plan(ladder__decode_rows=[1, 4]).warnings
    assert "the largest decode rung has 4 rows" in warning
    (warning,) = plan(batch_processing__base_batch_size=16).warnings
    assert "base_batch_size of 16 is above batch_processing.max_batch_size of 8" in warning


def test_a_ladder_of_many_rungs_is_warned_of():
    (warning,) = plan(ladder__prefill_tokens=list(range(4, 65, 4)), ladder__max_rungs=4).warnings
    assert "more than ladder.max_rungs of 4" in warning


def test_a_field_without_effect_is_named():
    (warning,) = plan(precision__load_threshold=0.5).warnings
    assert "precision.load_threshold has no effect" in warning


@pytest.mark.parametrize(("overlap", "num_warnings"), [("off", 1), ("on", 1), ("auto", 0)])
def test_forms_are_judged_only_where_both_are_compiled(overlap, num_warnings):
    warnings = plan(parallel__judge_overlap_in_traffic=False, parallel__micro_batch_overlap=overlap).warnings
    found = [w for w in warnings if w.startswith("parallel.judge_overlap_in_traffic has no effect")]
    assert len(found) == num_warnings
    assert all(f"micro_batch_overlap is {overlap}" in w for w in found)


def test_what_no_start_can_serve_is_refused_and_where_it_need_not_a_warning():
    def refuses(new):
        raise InvalidRequest("experts.resident_experts is 99", param="experts.resident_experts")

    old = config()
    rest = BucketLadder.from_config(old, 256), ENVELOPE, lambda bucket: RungCost(2.0, 0), refuses
    with pytest.raises(InvalidRequest, match="is 99"):
        plan_change(old, old, *rest)
    assert plan_change(old, old, *rest, must_start=False).warnings == (
        "the next start would fail: experts.resident_experts is 99",
    )


def test_every_field_has_a_kind_and_what_has_no_effect_exists():
    for section, fields in EngineConfig().model_dump().items():
        for name in fields:
            assert kind_of(section, name) in ChangeKind
    for path in WITHOUT_EFFECT:
        section, name = path.split(".")
        assert kind_of(section, name)
