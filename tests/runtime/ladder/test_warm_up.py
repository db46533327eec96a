"""A warm-up runs what traffic will run, and leaves no trace that traffic could see."""

import numpy as np

from runtime.request import Request, SamplingParams
from runtime.schedule.plan import Phase
from tests.engine_driver import EngineDriver

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def test_a_decode_rung_is_warmed_up_by_a_step_that_reaches_experts():
    driver = EngineDriver()
    engine, seen = driver.engine, []
    launch = engine._run

    def spy(plan, bucket, packed):
        seen.append((bucket, launch(plan, bucket, packed)))
        return seen[-1][1]

    engine._run = spy  # pyright: ignore[reportAttributeAccessIssue]
    for bucket in engine.ladder.rungs:
        engine.warm_up(bucket)
    counts = {bucket.name: int(np.asarray(step.expert_tokens).sum()) for bucket, step in seen}
    layers, top_k = engine.arch.num_layers, engine.arch.top_k
    for bucket in engine.ladder.of(Phase.DECODE):
        assert counts[bucket.name] == bucket.rows * layers * top_k
    driver.close()


def test_warm_ups_between_steps_change_no_text():
    driver = EngineDriver()
    requests = [Request(f"a{i}", (3, 4, 5 + i), PARAMS) for i in range(3)]
    expected = driver.run(requests)
    sequences = [driver.scheduler.add(Request(f"b{i}", (3, 4, 5 + i), PARAMS)) for i in range(3)]
    turn = 0
    while not driver.scheduler.is_idle:
        driver.turn()
        driver.engine.warm_up(driver.engine.ladder.rungs[turn % len(driver.engine.ladder.rungs)])
        turn += 1
    assert [s.output_ids for s in sequences] == expected
    driver.close()
