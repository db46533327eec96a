"""What an operator reads: plain data, and every reason is explained."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from runtime.experts.rebalancing import Reason
from tests.runtime.engine.expert_engine import Served

DOCS = Path(__file__).parents[3] / "docs" / "experts.md"


def test_status_and_answer_are_json():
    """numpy's numbers look like numbers until the answer is written."""
    served = Served()
    served.step()
    done = served.order(rebalance="plan")
    while not done.done():
        served.step()
    answer = json.loads(json.dumps(asdict(done.result())))
    assert answer["status"]["slot_experts"] == served.mover.placement.slot_experts.tolist()
    assert sum(answer["moves_by_layer"]) == answer["num_moves"]


@pytest.mark.parametrize("reason", [*Reason, "planning", "ordered"])
def test_every_reason_is_explained(reason):
    assert f"`{reason}`" in DOCS.read_text(encoding="utf-8")
