"""What a snapshot says about the ladder: costs, weights and what a change brought."""

from dataclasses import replace

import pytest

from control_plane.ladder_advice import AppliedProposal, position_weights, propose, rung_costs
from runtime.config import parse_config
from runtime.engine.stats import EngineSnapshot
from runtime.ladder.bucket import Bucket
from runtime.schedule.plan import Phase
from tests.control_plane.ladders import LadderEngine, snapshot_of

CONFIG = parse_config({})


def timed(prefill_s: float, decode_s: float, hits: int = 1) -> EngineSnapshot:
    """Steps that take a millisecond and so many seconds for each position."""
    snapshot = snapshot_of()
    each = {"prefill": prefill_s, "decode": decode_s}
    rungs = tuple(replace(r, hits=hits, step_s=1e-3 + each[r.phase] * r.size) for r in snapshot.rungs)
    return replace(snapshot, rungs=rungs)


def test_rungs_by_their_names_without_those_that_failed():
    snapshot = snapshot_of()
    rungs = tuple(replace(r, state="failed") if r.name == "decode-32" else r for r in snapshot.rungs)
    costs = rung_costs(replace(snapshot, rungs=rungs))
    assert Bucket(Phase.PREFILL, 512, 16) in costs
    assert Bucket(Phase.DECODE, 28, 28) in costs
    assert Bucket(Phase.DECODE, 32, 32) not in costs


@pytest.mark.parametrize(
    ("prefill_s", "decode_s", "hits", "weight"),
    [
        (1e-4, 5e-4, 1, 5.0),
        (1e-4, 5e-4, 0, 1.0),  # never used, so never measured
        (1e-4, 5e-2, 1, 10.0),  # bounded
        (1e-4, 0.0, 1, 0.1),
        (-1e-6, 5e-4, 1, 1.0),  # noise
    ],
)
def test_a_row_weighs_what_it_takes(prefill_s, decode_s, hits, weight):
    weights = position_weights(timed(prefill_s, decode_s, hits))
    assert weights == {Phase.PREFILL: 1.0, Phase.DECODE: pytest.approx(weight)}


def test_what_a_ladder_brought_ends_when_another_serves():
    engine = LadderEngine(CONFIG)
    engine.ask_for("decode", 5, 20_000)
    old = engine.now
    applied = AppliedProposal(2, propose(old, CONFIG), old)
    assert applied.observe(old) is None
    lists = {"prefill_tokens": applied.proposal.prefill_tokens, "decode_rows": applied.proposal.decode_rows}
    new = replace(snapshot_of(parse_config({"ladder": lists})), demand=old.demand)
    assert applied.observe(new).num_steps == 0
    later = replace(new, demand={"prefill": {}, "decode": {5: 20_010, 6: 10}})
    gain = applied.observe(later)
    assert (gain.num_steps, gain.padding_before.decode) == (20, pytest.approx(10 / 120))
    assert applied.observe(old) is None
    assert applied.observe(later) is None  # whose steps those in between were nobody knows
