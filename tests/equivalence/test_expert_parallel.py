"""Several devices give the text of one: whatever their number, the exchange, the placement of experts, and its moves.

Every count up to eight once; tests/conformance/device_counts.py has the cross product with exchanges and copies.
"""

from itertools import pairwise

import numpy as np
import pytest

from runtime.adaptive import form_judge
from runtime.adaptive.decision import DecisionLog
from runtime.adaptive.form_judge import HALVES, WHOLE
from runtime.config import EngineConfig
from runtime.engine.balancing import ExpertBalancing
from runtime.engine.expert_mover import MisfitError
from runtime.errors import ModelLoadError
from runtime.experts.placement import Move
from runtime.ladder.late_compiles import monitor
from tests.engine_driver import EngineDriver, request
from tests.sharded_driver import PROMPTS, SMALL, batch, run_through_moves, start

RICH = {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "logit_bias": ((7, 2.0),), "logprobs": 2}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    driver = start()
    try:
        return {"greedy": driver.run(batch("g", 64)), "rich": driver.run(batch("r", **RICH))}
    finally:
        driver.close()


@pytest.fixture(scope="module")
def four():
    driver = start(4, redundant_experts=4, exchange="all_to_all", capacity_factor=0.25)
    yield driver
    driver.close()


TIGHT = {"exchange": "all_to_all", "capacity_factor": 0.1}  # rounds overflow


@pytest.mark.parametrize(
    ("shards", "tensor", "parallel"),
    [
        (2, 2, {"exchange": "all_to_all", "capacity_factor": 64.0, "micro_batch_overlap": "on"}),
        (3, 1, TIGHT),
        (5, 1, {"exchange": "gather", "redundant_experts": 3}),
        (6, 1, TIGHT),
        (7, 1, TIGHT | {"redundant_experts": 2}),
        (8, 1, {"exchange": "gather"}),
    ],
    ids=["2x2-halves", "3-tight", "5-copies", "6-tight", "7-tight-copies", "8"],
)
def test_devices_are_one(shards, tensor, parallel, expected) -> None:
    driver = start(shards, tensor, **parallel)
    try:
        assert driver.run(batch("g")) == expected["greedy"][:8]
        assert driver.run(batch("r", **RICH)) == expected["rich"]
        _, collected = driver.steps[-1]
        assert collected.device_rows.shape == (2, shards)
        assert collected.device_rows.sum() == collected.expert_tokens.sum() > 0
        has_halves = parallel.get("micro_batch_overlap") == "on"
        assert [c.is_in_halves for c in driver.engine.forms.choices.values()] == [True, True] * has_halves
    finally:
        driver.close()


@pytest.fixture(scope="module")
def both_forms():
    """In halves, whatever they cost, from the first launch on; a judge would try the other form at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(form_judge, "FIRST_AFTER", 0)
        driver = start(2, **TIGHT | {"micro_batch_overlap": "on"})
    yield driver
    driver.close()


def test_halves_give_the_text_of_one_device(both_forms, expected) -> None:
    assert both_forms.run(batch("h")) == expected["greedy"][:8]
    assert both_forms.run(batch("hr", **RICH)) == expected["rich"]
    assert {step.turn.form for step, _ in both_forms.steps} == {HALVES}


def test_text_is_the_same_while_forms_take_turns(both_forms, expected) -> None:
    """Both rungs are judged while 64 requests run, and the form that serves changes under them."""
    driver, forms = both_forms, both_forms.engine.forms
    driver.steps.clear()
    forms.is_forced = False
    driver.step_s = lambda step: 1.0 if step.turn.form == HALVES else 0.5
    monitor.arm()
    for num in range(6):
        assert driver.run(batch(f"turns-{num}", 64)) == expected["greedy"]
        driver.scheduler.clear_prefix_cache()
        if all(choice.source == "traffic" for choice in forms.choices.values()):
            break
    assert monitor.num_late == 0
    for rung in driver.engine.ladder.rungs:
        ran = [step.turn.form for step, _ in driver.steps if step.bucket == rung]
        assert len([1 for a, b in pairwise(ran) if a != b]) >= 8
        choice = forms.choices[rung.name]
        assert (choice.is_in_halves, choice.source, choice.reason) == (False, "traffic", "faster")
        assert forms.turn(rung).form == WHOLE
    kept = driver.engine.ladder.decode[-1]
    driver.engine.keep_rungs((kept,))
    assert list(forms.choices) == [kept.name]  # what is gone is not shown, judged or remembered
    assert forms.turn(driver.engine.ladder.prefill[-1]) is None


def test_scores_come_from_the_shard_that_has_them(four) -> None:
    """Log probabilities of prompts on all four shards at once are those of each prompt alone."""

    def scores(tag: str, prompts: list[int]) -> list[list[float]]:
        four.steps.clear()
        four.scheduler.clear_prefix_cache()
        four.run([request(f"{tag}-{i}", PROMPTS[i], max_tokens=1, prompt_logprobs=1) for i in prompts])
        found: dict[str, list[float]] = {}
        for _, c in four.steps:
            for name, part in c.prompt_logprobs.items():
                found.setdefault(name, []).extend(lp.logprob for lp in part.logprobs)
        return [found[f"{tag}-{i}"] for i in prompts]

    together = scores("together", [5, 6, 7, 8])
    alone = [scores("alone", [i])[0] for i in (5, 6, 7, 8)]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_rows_and_prefixes_spread_over_the_shards(four) -> None:
    four.scheduler.clear_prefix_cache()
    hits = four.scheduler.prefix_hits
    first = four.run(batch("spread"))
    assert {chunk.row // 2 for step, _ in four.steps for chunk in step.plan.chunks} == {0, 1, 2, 3}
    assert four.run(batch("again")) == first
    assert four.scheduler.prefix_hits > hits  # bound to the shard that knows the prefix


def test_text_is_the_same_through_twenty_rebalances(four, expected) -> None:
    """Random placements, one after another while 64 requests run; nothing is compiled for it."""
    mover = four.mover
    moved = mover.num_applied
    monitor.arm()
    try:
        texts, orders = run_through_moves(four, batch("moving", 64), num_orders=20)
        assert texts == expected["greedy"]
        assert orders == 20
        assert mover.num_applied > moved + 60
        while mover.num_waiting:
            mover.turn(2)
        four.scheduler.clear_prefix_cache()
        assert four.run(batch("after", 64)) == expected["greedy"]
        assert monitor.num_late == 0
    finally:
        monitor.disarm()


def test_the_weight_changes_rows_and_no_text(four, expected) -> None:
    """From one launch to the next, compiling nothing; the engine starts with the configuration's, which is not 0."""
    rows = {}
    monitor.arm()
    try:
        for weight in (None, 0.0, 0.25, 0.5):
            if weight is not None:
                four.mover.set_balance_weight(weight)
            four.scheduler.clear_prefix_cache()
            four.steps.clear()
            assert four.run(batch(f"weight-{weight}", 64)) == expected["greedy"]
            rows[weight] = np.sum([collected.device_rows.max(axis=1) for _, collected in four.steps])
        assert rows[0.5] == rows[None] < rows[0.0]
        assert monitor.num_late == 0
    finally:
        monitor.disarm()
        four.mover.set_balance_weight(0.5)


def test_leaning_acts_with_the_next_launch(four) -> None:
    """Scores are below 1, so this much keeps everything from expert 0; nothing is compiled for it."""
    lean = np.zeros((2, 8), np.float32)
    lean[:, 0] = -2
    monitor.arm()
    try:
        four.mover.set_lean(lean)
        four.scheduler.clear_prefix_cache()
        four.steps.clear()
        four.run(batch("leaning"))
        tokens = np.sum([collected.expert_tokens for _, collected in four.steps], axis=0)
        assert (tokens[:, 0] == 0).all()
        assert tokens.sum() > 0
        assert monitor.num_late == 0
    finally:
        monitor.disarm()
        four.mover.set_lean(np.zeros_like(lean))
        four.scheduler.clear_prefix_cache()


def test_leaning_is_taken_back_at_once_and_whole(four, expected) -> None:
    """What requests of before, and one that still runs, computed while it held is in nobody's prefix."""

    def config(strength: float) -> EngineConfig:
        batching = four.config.batch_processing.model_copy(update={"expert_lean_between": strength})
        return four.config.model_copy(update={"batch_processing": batching})

    forget = four.scheduler.clear_prefix_cache
    balancing = ExpertBalancing(config(0.5), four.mover, DecisionLog(8), lambda: 0.0, forget)
    tokens = np.ones((2, 8), np.int64)
    tokens[:, 0] = 1000
    rows = np.repeat([[1000, 2, 2, 3]], 2, axis=0)
    for turn in range(1, 40):
        balancing.on_step(tokens, rows, 1, 0.01)
        balancing.turn(60.0 * turn, None)
    forget()
    leaning = four.run(batch("leaning-whole"))
    running = four.scheduler.add(request("running", PROMPTS[0], max_tokens=40))
    for _ in range(4):
        four.turn()
    assert running.finish_reason is None
    balancing.configure(config(0.0))
    assert four.run(batch("upright")) == expected["greedy"][:8] != leaning
    assert four.run(batch("upright-again")) == expected["greedy"][:8]


def test_an_order_for_another_placement_moves_nothing(four) -> None:
    mover = four.mover
    before, expert = mover.placement, int(mover.placement.slot_experts[0, 1])
    wrong = Move(layer=0, to_slot=5, expert=(expert + 1) % before.num_experts, from_slot=1)
    mover.order([wrong])
    with pytest.raises(MisfitError, match=f"from_slot holds expert {expert}"):
        mover.turn(8)
    assert (mover.num_waiting, mover.placement) == (0, before)
    assert four.run(batch("still", 2)) == four.run(batch("still-2", 2))


@pytest.mark.parametrize(
    ("parallel", "field"),
    [
        ({"expert_parallel_size": 16}, "expert_parallel_size is 16"),
        ({"expert_parallel_size": 8, "tensor_parallel_size": 2}, "needs 16 devices, 8 are present"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size is 4"),
        ({"expert_parallel_size": 2, "exchange": "ragged"}, "exchange is ragged"),
        ({"redundant_experts": 2}, "redundant_experts is 2"),
        ({"expert_parallel_size": 2, "redundant_experts": 9}, "redundant_experts is 9; at most 8"),
    ],
)
def test_what_does_not_fit_is_named(parallel, field) -> None:
    with pytest.raises(ModelLoadError, match=field):
        EngineDriver(parallel=parallel, ladder=SMALL)
