"""docs/controllers.md says what the code does: the table of both forms, and a line for every reason."""

import re
from pathlib import Path

import pytest

from runtime.adaptive.batch_size import BatchSizeState, decide_batch_size
from runtime.adaptive.choice import Reason
from tests.runtime.adaptive.observations import NOW_S, make_config, observe

PAGE = (Path(__file__).parents[3] / "docs" / "controllers.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
RUNGS = (8, 16, 24, 32, 48, 64, 96, 128)


def size_after_15_s(load: float, alpha: float, form: str) -> int:
    config = make_config(alpha=alpha, base_batch_size=32, controller={"form": form})
    state, size = BatchSizeState(32), 32
    for tick in range(30):
        now_s = NOW_S + 0.5 * tick
        obs = observe(
            time_s=now_s,
            num_running=8,
            decode_rungs=RUNGS,
            used_pages=0,
            decode_step_s=load * config.slo.itl,
        )
        state, choice = decide_batch_size(state, obs, config, now_s)
        size = choice.value
    return size


@pytest.mark.parametrize(("load", "alpha", "formula", "published", "current"), ROWS)
def test_the_table_of_both_forms(load, alpha, formula, published, current):
    assert f"{32 * (1 + float(alpha) * (1 - float(load) / 0.75)):.1f}" == formula
    assert size_after_15_s(float(load), float(alpha), "published") == int(published)
    assert size_after_15_s(float(load), float(alpha), "current") == int(current)


def test_the_page_has_the_table_and_every_reason():
    assert len(ROWS) == 8
    reasons = PAGE.partition("## Reasons")[2]
    assert {reason.value for reason in Reason} <= set(re.findall(r"`(\w+)`", reasons))
