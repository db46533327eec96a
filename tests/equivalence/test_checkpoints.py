"""The whole engine on checkpoints that transformers wrote: the same 64 greedy tokens for each prompt, all at once."""

from pathlib import Path

import numpy as np
import pytest

from tests.engine_driver import EngineDriver, request

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"


@pytest.mark.parametrize("name", ["qwen3-gqa-tied", "mixtral-window-fused", "olmoe-clip"])
def test_greedy_text_is_that_of_transformers(name):
    folder = CHECKPOINTS / name
    with np.load(folder / "expected.npz") as data:
        prompts, greedy = ([data[f"{key}_{i}"].tolist() for i in range(3)] for key in ("prompt", "greedy"))
    driver = EngineDriver(folder=folder, ladder={"decode_rows": [4], "prefill_tokens": [16]})
    try:
        requests = [request(f"{i}", p, max_tokens=len(greedy[i])) for i, p in enumerate(prompts)]
        assert driver.run(requests) == greedy
    finally:
        driver.close()
