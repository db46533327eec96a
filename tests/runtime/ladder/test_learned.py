"""The learned ladder is the best one there is, keeps what must stay, and does not chase noise."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import EngineConfig, parse_config
from runtime.ladder.bucket import Bucket
from runtime.ladder.ladder import BucketLadder, default_decode_rows
from runtime.ladder.learned import (
    MIN_STEPS,
    PriceFactors,
    RungCost,
    best_rungs,
    learn_ladder,
    padded,
    padding_of,
    smoothed,
    split_rungs,
)
from runtime.schedule.plan import Phase

CONFIG = parse_config({})
FREE = PriceFactors(serve_s=float("inf"), share_per_gib=0.0)


def rungs_of(config: EngineConfig = CONFIG, compile_s: float = 1.0) -> dict[Bucket, RungCost]:
    ladder = BucketLadder.from_config(config, max_context=2048)
    return {bucket: RungCost(compile_s, 1 << 20) for bucket in ladder.rungs}


def many(demand: dict[int, float]) -> dict[int, float]:
    return {size: steps * MIN_STEPS for size, steps in demand.items()}


DEMANDS = st.dictionaries(st.integers(1, 12), st.integers(1, 50), max_size=8)


@given(DEMANDS, st.sets(st.integers(1, 11), max_size=2), st.integers(0, 40), st.sets(st.integers(1, 12)))
def test_every_count_of_rungs_is_optimal(demand, forced, price, priced):
    """Against every subset of the candidates that holds the largest and the forced ones."""

    def price_of(size: int) -> float:
        return price if size in priced else 0.0

    curve = best_rungs(demand, range(1, 13), 6, forced=forced, price=price_of)
    assert len(curve.costs) == len(curve.rungs) == 7
    for k in range(1, 7):
        found = [
            padded(demand, {12, *rest}) + sum(map(price_of, {12, *rest}))
            for rest in itertools.combinations(range(1, 12), k - 1)
            if forced <= {12, *rest}
        ]
        if not found:
            assert (curve.costs[k], curve.rungs[k]) == (float("inf"), ())
            continue
        rungs = curve.rungs[k]
        assert curve.costs[k] == pytest.approx(min(found))
        assert curve.padding[k] + sum(map(price_of, rungs)) == pytest.approx(curve.costs[k])
        assert len(rungs) == k
        assert rungs[-1] == 12
        assert forced <= {*rungs}


@given(DEMANDS, st.integers(1, 6))
def test_no_ladder_beats_the_one_on_asked_for_sizes(demand, k):
    """The bound: candidates that nobody asked for never help."""
    narrow = best_rungs(demand, {*demand, 12}, k)
    wide = best_rungs(demand, range(1, 13), k)
    assert min(narrow.padding) == pytest.approx(min(wide.padding))


def test_a_size_between_candidates_goes_up_and_a_larger_one_is_refused():
    assert best_rungs({5: 2, 8: 1}, (4, 8), 2).padding[1:] == (6.0, 6.0)
    with pytest.raises(ValueError, match="asked for 9 positions, the largest candidate is 8"):
        best_rungs({9: 1}, (4, 8), 2)
    with pytest.raises(ValueError, match=r"forced sizes \[3\]"):
        best_rungs({4: 1}, (4, 8), 2, forced={3})
    with pytest.raises(ValueError, match="no rung covers 9 positions"):
        padded({9: 1}, (4, 8))


@given(DEMANDS, DEMANDS, st.integers(2, 10))
def test_the_split_is_the_best_pair(prefill, decode, max_rungs):
    curves = [best_rungs(d, range(1, 13), max_rungs) for d in (prefill, decode)]
    p, d = split_rungs(*curves, max_rungs)
    assert p + d <= max_rungs
    pairs = itertools.product(range(1, max_rungs), repeat=2)
    best = min(curves[0].costs[a] + curves[1].costs[b] for a, b in pairs if a + b <= max_rungs)
    assert curves[0].costs[p] + curves[1].costs[d] == pytest.approx(best)


def test_too_few_rungs_for_what_must_stay_is_an_error():
    config = parse_config({"ladder": {"max_rungs": 3}})
    with pytest.raises(ValueError, match=r"ladder\.max_rungs is 3"):
        learn_ladder({"prefill": many({512: 1}), "decode": many({32: 1})}, config, rungs_of())


def test_small_answer():
    """Two sizes a phase: rungs for those, the guards, the largest; nothing else is worth a compile."""
    demand = {"prefill": many({96: 3, 208: 5}), "decode": many({5: 4, 32: 1})}
    proposal = learn_ladder(demand, CONFIG, rungs_of(compile_s=1.5))
    assert {64, 96, 208, 512} <= {*proposal.prefill_tokens}
    assert {1, 5, 32} <= {*proposal.decode_rows}
    assert "decode-5" in proposal.rungs_to_add
    assert "prefill-208x13" in proposal.rungs_to_add
    assert proposal.padding_predicted.both < 0.01 < proposal.padding_now.both
    assert proposal.lower_bound.both == 0
    assert proposal.num_sizes == 4
    assert proposal.compile_s == 1.5 * len(proposal.rungs_to_add)
    assert proposal.gain == proposal.padding_now.both - proposal.padding_predicted.both  # all weigh 1


@given(
    st.dictionaries(st.integers(1, 32).map(lambda p: 16 * p), st.integers(1, 10**6), min_size=1),
    st.dictionaries(st.integers(1, 32), st.integers(1, 10**6), min_size=1),
    st.integers(6, 24),
)
def test_what_always_holds(prefill, decode, max_rungs):
    config = parse_config({"ladder": {"max_rungs": max_rungs}})
    demand = {"prefill": many(prefill), "decode": many(decode)}
    rungs = rungs_of(config)
    proposal = learn_ladder(demand, config, rungs, FREE)
    assert len(proposal.prefill_tokens) + len(proposal.decode_rows) <= max_rungs
    assert proposal.decode_rows[0] == 1
    assert proposal.decode_rows[-1] == 32
    assert proposal.prefill_tokens[-1] == 512
    assert 64 in proposal.prefill_tokens
    assert all(size % 16 == 0 for size in proposal.prefill_tokens)
    assert proposal.lower_bound.both <= proposal.padding_predicted.both + 1e-12
    # The names are those of the ladder that the lists give.
    lists = {"prefill_tokens": proposal.prefill_tokens, "decode_rows": proposal.decode_rows}
    ladder = BucketLadder.from_config(parse_config({"ladder": lists}), max_context=2048)
    names = {b.name for b in rungs} | {*proposal.rungs_to_add}
    assert names - {*proposal.rungs_to_drop} == {b.name for b in ladder.rungs}


def test_few_steps_teach_nothing():
    demand = {"prefill": {96: MIN_STEPS - 1}, "decode": many({7: 3})}
    proposal = learn_ladder(demand, CONFIG, rungs_of())
    assert proposal.prefill_tokens == tuple(16 * n for n in default_decode_rows(32))
    assert 7 in proposal.decode_rows
    assert proposal.notes == ("prefill: 999 steps seen, 1000 needed to learn; its rungs stay",)
    nothing = learn_ladder({}, CONFIG, rungs_of())
    assert not nothing.is_change
    assert nothing.padding_now.both == 0


def test_a_rung_must_be_worth_its_compile():
    """5 rows in each step: a rung of 5 spares a fifth of all positions against the rung of 6."""
    demand = {"prefill": {}, "decode": many({5: 1})}
    factors = PriceFactors(serve_s=100.0)
    cheap = learn_ladder(demand, CONFIG, rungs_of(compile_s=15.0), factors)
    dear = learn_ladder(demand, CONFIG, rungs_of(compile_s=25.0), factors)
    assert "decode-5" in cheap.rungs_to_add
    assert dear.rungs_to_add == ()
    assert PriceFactors(10.0, 0.1).price(RungCost(2.0, 1 << 29), 100.0) == pytest.approx(25.0)


def test_a_rung_must_be_worth_its_memory():
    """Rungs that nobody asks for are dropped although they are compiled."""
    rungs = {bucket: RungCost(1.0, 1 << 30) for bucket in rungs_of()}
    proposal = learn_ladder(
        {"prefill": {}, "decode": many({32: 1})}, CONFIG, rungs, PriceFactors(share_per_gib=0.05)
    )
    assert proposal.decode_rows == (1, 32)
    assert "decode-28" in proposal.rungs_to_drop


def test_the_dearer_phase_gets_the_rungs():
    """Both phases could use all the rungs there are; what a position costs decides who does."""
    config = parse_config({"ladder": {"max_rungs": 12}})
    demand = {
        "prefill": many({16 * n: 1 for n in range(1, 33)}),
        "decode": many({n: 16 for n in range(1, 33)}),
    }
    num, gain = {}, {}
    for name, weight in (("cheap", 0.1), ("alike", 1.0), ("dear", 10.0)):
        weights = {Phase.PREFILL: 1.0, Phase.DECODE: weight}
        num[name] = len(learn_ladder(demand, config, rungs_of(config), FREE, weights).decode_rows)
        gain[name] = learn_ladder(demand, CONFIG, rungs_of(), FREE, weights).gain
    assert num["cheap"] < num["alike"] == 6 < num["dear"]
    assert min(gain.values()) > 0  # in what it costs, whatever it does to the plain sum


def test_sizes_of_a_larger_ladder_count_as_the_largest():
    config = parse_config({"batch_processing": {"max_batch_size": 8}})
    proposal = learn_ladder({"decode": many({20: 1, 3: 1})}, config, rungs_of(config))
    assert proposal.decode_rows[-1] == 8
    assert proposal.padding_now.decode == 0


def test_smoothing_keeps_the_number_of_steps():
    demand = smoothed({16: 100.0}, range(16, 161, 16))
    assert sum(demand.values()) == pytest.approx(100)
    assert demand[16] == pytest.approx(98.2)
    assert demand[160] == pytest.approx(0.2)


def test_what_was_learned_from_a_sample_holds_for_the_next():
    """Two draws of one law: the second is padded hardly more than the first, and less than by any plain rule."""
    draw = random.Random(7)

    def drawn() -> dict[str, dict[int, float]]:
        demand: dict[str, dict[int, float]] = {"prefill": {}, "decode": {}}
        for _ in range(4000):
            pages = min(32, 1 + int(draw.expovariate(1 / 9)))
            rows = min(32, max(1, int(draw.gauss(14, 5))))
            demand["prefill"][16 * pages] = demand["prefill"].get(16 * pages, 0) + 1
            demand["decode"][rows] = demand["decode"].get(rows, 0) + 1
        return demand

    seen, unseen = drawn(), drawn()
    proposal = learn_ladder(seen, CONFIG, rungs_of(), FREE)
    learned = {Phase.PREFILL: proposal.prefill_tokens, Phase.DECODE: proposal.decode_rows}
    twos = {Phase.PREFILL: (16, 32, 64, 128, 256, 512), Phase.DECODE: (1, 2, 4, 8, 16, 32)}
    steps = {Phase.PREFILL: range(64, 513, 64), Phase.DECODE: range(4, 33, 4)}
    demand = {phase: unseen[phase] for phase in Phase}
    on_unseen = padding_of(demand, learned).both
    assert on_unseen < 1.3 * proposal.padding_predicted.both
    assert on_unseen < 0.6 * min(padding_of(demand, twos).both, padding_of(demand, steps).both)
