"""The loads that the experts' benchmark replays: the excerpt, the token-wise files, and what is refused."""

import numpy as np
import pytest

from runtime.bench.expert_loads import (
    EXCERPT,
    STEP_TOKENS,
    TASKS,
    draw,
    read_recorded,
    shifted,
    zipf_rates,
)


def write_routing(folder, task, ids):
    np.savez(folder / f"esft_routing_{task}.npz", expert_ids=ids)


def test_the_excerpt_is_small_and_whole():
    loads = read_recorded(None)
    assert EXCERPT.stat().st_size < 1_000_000
    assert {task: len(steps) for task, steps in loads.steps.items()} == dict(
        zip(TASKS, (64, 64, 66), strict=True)
    )
    for steps in loads.steps.values():
        assert (steps.sum(axis=2) == STEP_TOKENS * 6).all()
        assert (steps.sum(axis=0) > 0).all()  # no expert is unused in any layer
    windows = loads.windows()
    assert [task for task, _ in windows] == [task for task in TASKS for _ in range(8)]
    assert windows[0][1].shape == (8, 26, 64)


def test_token_wise_files_are_counted_by_step(tmp_path):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 64, (2 * 1024 + 100, 2, 3), np.uint8)
    for task in TASKS:
        write_routing(tmp_path, task, ids)
    steps = read_recorded(tmp_path).steps["summary"]
    assert steps.shape == (16, 2, 64)  # what does not fill a step is dropped
    assert steps[3, 1, 7] == (ids[3 * 128 : 4 * 128, 1] == 7).sum()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros((4096, 2), np.uint8), "expert_ids must be uint8"),
        (np.zeros((4096, 2, 6), np.int64), "expert_ids must be uint8"),
        (np.full((4096, 2, 6), 64, np.uint8), "experts below 64"),
        (np.zeros((100, 2, 6), np.uint8), "needs 2048 tokens or more"),
    ],
)
def test_files_that_are_not_routing_are_refused(tmp_path, ids, message):
    write_routing(tmp_path, "intent", ids)
    with pytest.raises(ValueError, match=message):
        read_recorded(tmp_path)
    with pytest.raises(OSError, match="esft_routing_intent"):
        read_recorded(tmp_path / "nowhere")


def test_synthetic_loads():
    rng = np.random.default_rng(0)
    rates = zipf_rates(rng)
    np.testing.assert_allclose(rates.sum(axis=1), 1)
    assert rates[0].max() / rates[0].min() == pytest.approx(256**0.8)
    assert not np.array_equal(rates[0].argsort(), rates[1].argsort())
    changed = shifted(rng, rates, 0.1)
    assert ((changed != rates).sum(axis=1) == 26).all()
    np.testing.assert_allclose(np.sort(changed), np.sort(rates))
    assert (draw(rng, rates, 4096).sum(axis=1) == 4096 * 8).all()
