"""Several devices give the text of one: whatever their number, the exchange, the placement of experts, and its moves."""

import numpy as np
import pytest

from runtime.errors import ModelLoadError
from runtime.experts.moves import plan_moves
from runtime.experts.placement import ExpertPlacement, Move
from runtime.ladder.late_compiles import monitor
from tests.engine_driver import EngineDriver, request

PROMPTS = [np.random.RandomState(i).randint(0, 128, 3 + i * 37 % 50).tolist() for i in range(64)]
SMALL = {"decode_rows": [8], "prefill_tokens": [64], "max_decode_steps": 4}


def start(shards: int = 1, tensor: int = 1, **parallel) -> EngineDriver:
    sizes = {"expert_parallel_size": shards, "tensor_parallel_size": tensor}
    return EngineDriver(parallel=sizes | parallel, ladder=SMALL, batch_processing={"max_batch_size": 8})


def batch(tag: str, num: int = 8, **params):
    return [request(f"{tag}-{i}", p, **({"max_tokens": 12} | params)) for i, p in enumerate(PROMPTS[:num])]


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


@pytest.mark.parametrize(
    ("shards", "tensor", "parallel"),
    [(2, 2, {"exchange": "all_to_all", "micro_batch_overlap": "on"}), (8, 1, {"exchange": "gather"})],
    ids=["2x2-halves", "8"],
)
def test_devices_are_one(shards, tensor, parallel, expected) -> None:
    driver = start(shards, tensor, **parallel)
    try:
        assert driver.run(batch("g")) == expected["greedy"][:8]
        assert driver.run(batch("r", **RICH)) == expected["rich"]
        _, collected = driver.steps[-1]
        assert collected.device_rows.shape == (2, shards)
        assert collected.device_rows.sum() == collected.expert_tokens.sum() > 0
    finally:
        driver.close()


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
    mover, rng, orders = four.mover, np.random.default_rng(0), 0
    moved = mover.num_applied
    monitor.arm()
    try:
        for request_ in batch("moving", 64):
            four.scheduler.add(request_)
        sequences = [four.scheduler._in_line(f"moving-{i}") for i in range(64)]
        while not four.scheduler.is_idle:
            if not mover.num_waiting and orders < 20:
                mover.order(plan_moves(mover.placement, random_placement(rng, mover.placement)))
                orders += 1
            mover.turn(4)
            four.turn()
        assert [s.output_ids for s in sequences] == expected["greedy"]
        assert orders == 20
        assert mover.num_applied > moved + 60
        while mover.num_waiting:
            mover.turn(2)
        four.scheduler.clear_prefix_cache()
        assert four.run(batch("after", 64)) == expected["greedy"]
        assert monitor.num_late == 0
    finally:
        monitor.disarm()


def test_an_order_for_another_placement_moves_nothing(four) -> None:
    mover = four.mover
    before, expert = mover.placement, int(mover.placement.slot_experts[0, 1])
    wrong = Move(layer=0, to_slot=5, expert=(expert + 1) % before.num_experts, from_slot=1)
    mover.order([wrong])
    with pytest.raises(ValueError, match=f"from_slot holds expert {expert}"):
        mover.turn(8)
    assert (mover.num_waiting, mover.placement) == (0, before)
    assert four.run(batch("still", 2)) == four.run(batch("still-2", 2))


def random_placement(rng: np.random.Generator, like: ExpertPlacement) -> ExpertPlacement:
    """Experts in random order, the spare slots filled with experts that the device does not hold."""
    rows = []
    for _ in range(like.num_layers):
        order = rng.permutation(like.num_experts)
        for part in np.array_split(order, like.num_devices):
            others = [e for e in rng.permutation(like.num_experts) if e not in part]
            rows.append([*part, *others[: like.slots_per_device - len(part)]])
    return ExpertPlacement(np.reshape(rows, (like.num_layers, -1)), like.num_devices, like.num_experts)


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
