"""Forecasts of expert loads: noise is averaged away, keys are learned from mixtures, and the last window is the floor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.experts.load_predictor import LoadPredictor, PredictorConfig, Source, distance

RNG = np.random.default_rng(0)
A, B = (
    RNG.dirichlet(np.full(16, 0.5), size=2),
    RNG.dirichlet(np.full(16, 0.5), size=2),
)  # [L, E] rates of two tasks


def sample(rng, rates, num=2000):
    return rng.multinomial(num, rates / rates.sum(axis=1, keepdims=True))


def test_before_anything_was_seen_all_experts_are_alike():
    prediction = LoadPredictor(2, 16).predict()
    assert np.all(prediction.loads == 1 / 16)
    assert prediction.source is Source.LAST_WINDOW


def test_steady_traffic_is_averaged():
    rng, predictor = np.random.default_rng(1), LoadPredictor(2, 16)
    for _ in range(12):
        last = sample(rng, A, 300)
        predictor.observe(last)
        prediction = predictor.predict()
    assert prediction.source in (Source.AVERAGE, Source.CLUSTER)
    assert distance(prediction.loads, A) < 0.5 * distance(last / 300, A)
    assert (prediction.uncertainty > 0).any()


def test_a_jump_to_known_traffic_is_forecast_from_what_was_known():
    rng, predictor = np.random.default_rng(2), LoadPredictor(2, 16)
    for rates in (A, A, A, A, B, B, B, B):
        predictor.observe(sample(rng, rates, 300))
    last = sample(rng, A, 300)
    predictor.observe(last)  # back to A: one noisy window, but A has been seen four times
    assert distance(predictor.predict().loads, A) < 0.8 * distance(last / 300, A)


def test_keys_know_the_next_window_before_it_comes():
    rng, predictor = np.random.default_rng(3), LoadPredictor(2, 16)
    for turn in range(12):
        rates, key = ((A, "a"), (B, "b"))[turn % 2]
        predictor.predict({key: 1})
        predictor.observe(sample(rng, rates), {key: 2000})
    for rates, key in ((A, "a"), (B, "b")):
        prediction = predictor.predict({key: 500})
        assert prediction.source is Source.MIX
        assert distance(prediction.loads, rates) < 0.1
    half = predictor.predict({"a": 7, "b": 7})
    assert distance(half.loads, (A + B) / 2) < 0.1


def test_keys_are_told_apart_from_mixtures_alone():
    rng, predictor = np.random.default_rng(4), LoadPredictor(2, 16, PredictorConfig(slow_gain=0.3))
    for _ in range(150):
        part = rng.random()
        mix = {"a": part, "b": 1 - part}
        predictor.predict(mix)
        predictor.observe(sample(rng, part * A + (1 - part) * B), mix)
    assert distance(predictor.predict({"a": 1}).loads, A) < 0.1
    assert distance(predictor.predict({"b": 1}).loads, B) < 0.1


def test_an_unknown_key_is_no_reason_to_guess():
    predictor = LoadPredictor(2, 16)
    for _ in range(4):
        predictor.observe(sample(RNG, A), {"a": 1})
    assert predictor.predict({"new": 1}).source is not Source.MIX


def test_keys_that_lie_lose_to_the_last_window():
    rng, predictor = np.random.default_rng(5), LoadPredictor(2, 16)
    sources = []
    for turn in range(30):
        key = ("a", "b")[int(rng.integers(2))]  # says nothing about what comes
        rates = A if (turn // 10) % 2 == 0 else B
        sources.append(predictor.predict({key: 1}).source)
        predictor.observe(sample(rng, rates, 20_000), {key: 1})
    assert Source.MIX not in sources[5:]


def test_keys_that_were_foreseen_wrongly_lose_to_the_last_window():
    """They were learned honestly; what is wrong is which of them is said to come."""
    rng, predictor = np.random.default_rng(8), LoadPredictor(2, 16)
    for turn in range(12):
        rates, key = ((A, "a"), (B, "b"))[turn % 2]
        predictor.predict({key: 1})
        predictor.observe(sample(rng, rates), {key: 1})
    predictions = []
    for _ in range(30):
        predictions.append(predictor.predict({"b": 1}))
        predictor.observe(sample(rng, A), {"a": 1})
    last = predictor.predict({"b": 1})
    assert predictions[0].source is Source.MIX
    assert Source.MIX not in [made.source for made in predictions[5:]]
    assert last.errors[Source.MIX] > 0.5 * distance(A, B)
    assert distance(last.loads, A) < 0.1
    assert np.sqrt(((predictions[2].loads - A) ** 2).mean()) < 3 * np.sqrt(
        (predictions[2].uncertainty ** 2).mean()
    )


def test_one_key_that_nobody_knows_does_not_make_the_others_unknown():
    rng, predictor = np.random.default_rng(9), LoadPredictor(2, 16)
    for turn in range(12):
        rates, key = ((A, "a"), (B, "b"))[turn % 2]
        predictor.predict({key: 90, f"new {turn}": 10})
        predictor.observe(sample(rng, rates), {key: 90, f"random {turn}": 10})
    for rates, key in ((A, "a"), (B, "b")):
        prediction = predictor.predict({key: 90, "unheard of": 10})
        assert prediction.source is Source.MIX
        assert distance(prediction.loads, rates) < 0.15
    np.testing.assert_allclose(prediction.loads.sum(axis=1), 1)


def test_keys_that_come_once_push_out_no_frequent_one():
    rng, predictor = np.random.default_rng(10), LoadPredictor(2, 16, PredictorConfig(max_keys=4))
    for turn in range(40):
        rare = {f"random {turn} {i}": 5.0 for i in range(4)}
        frequent = {("a", "b")[turn // 10 % 2]: 80.0}  # each stays away for ten windows
        predictor.observe(sample(rng, A), frequent | rare)
    assert {"a", "b"} < predictor._keys.keys()
    assert len(predictor._keys) == 4
    predictor.observe(sample(rng, A), {"another": 100.0})
    assert "another" in predictor._keys


def test_observing_in_slices_is_observing():
    whole, sliced = LoadPredictor(2, 16), LoadPredictor(2, 16)
    rng = np.random.default_rng(11)
    for _ in range(3):
        mix, counts = {str(i): float(rng.integers(1, 9)) for i in range(20)}, sample(rng, A)
        whole.observe(counts, mix, 3.0)
        num_slices = len(list(sliced.observing(counts, mix, 3.0)))
    assert num_slices == 3
    np.testing.assert_array_equal(whole.predict(mix, 3.0).loads, sliced.predict(mix, 3.0).loads)
    assert whole.predict(mix).errors == sliced.predict(mix).errors


def test_the_hour_is_a_source_of_its_own():
    rng, predictor = np.random.default_rng(6), LoadPredictor(2, 16)
    for _ in range(4):
        for hour, rates in ((9.5, A), (21.0, B)):
            predictor.predict(hour=hour)
            predictor.observe(sample(rng, rates), hour=hour)
    prediction = predictor.predict(hour=9.0)
    assert prediction.source is Source.HOUR
    assert distance(prediction.loads, A) < 0.1


def test_what_is_remembered_is_bounded():
    predictor = LoadPredictor(1, 4, PredictorConfig(max_clusters=2, max_keys=2, jump=0.1))
    for expert in range(4):
        counts = np.full((1, 4), 0)
        counts[0, expert] = 10
        predictor.observe(counts, {f"key {expert}": 10})
    assert set(predictor._keys) == {"key 2", "key 3"}
    assert len(predictor._clusters) == 2


def test_a_window_without_tokens_teaches_nothing():
    predictor = LoadPredictor(2, 16)
    predictor.observe(sample(RNG, A))
    before = predictor.predict().loads
    predictor.observe(np.zeros((2, 16)))
    assert np.array_equal(predictor.predict().loads, before)
    assert predictor.num_windows == 1


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(["a", "b", "", None])), max_size=12))
@settings(deadline=None)
def test_a_forecast_is_always_a_distribution(windows):
    predictor = LoadPredictor(2, 5)
    for seed, key in windows:
        rng = np.random.default_rng(seed)
        counts = rng.integers(0, 4, (2, 5)) * rng.integers(0, 1000, (2, 5))
        mix = None if key is None else {key: 3.0, "c": float(seed % 3)}
        predictor.observe(counts, mix, hour=seed % 24)
        prediction = predictor.predict(mix, hour=float(seed % 24))
        np.testing.assert_allclose(prediction.loads.sum(axis=1), 1)
        assert prediction.loads.min() >= 0
        assert np.isfinite(prediction.uncertainty).all()
        assert all(0 <= error <= 1 + 1e-9 for error in prediction.errors.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.observe(np.zeros((3, 16))), r"counts must be \[2, 16\], not \[3, 16\]"),
        (lambda p: p.observe(np.full((2, 16), -1)), "counts must be finite and not negative"),
        (lambda p: p.observe(np.full((2, 16), np.nan)), "counts must be finite"),
        (lambda p: p.observe(np.ones((2, 16)), {"a": -1}), r"mix\['a'\] must be a finite number"),
        (lambda p: p.predict({"a": float("inf")}), r"mix\['a'\]"),
        (lambda p: p.predict(hour=24), r"hour must be in \[0, 24\), not 24"),
        (lambda p: PredictorConfig(average_half_life=0), "average_half_life must be in"),
        (lambda p: PredictorConfig(key_half_life=-1), "key_half_life must be in"),
        (lambda p: PredictorConfig(slow_gain=2), "slow_gain must be in"),
        (lambda p: PredictorConfig(margin=1), "margin must be in"),
        (lambda p: PredictorConfig(max_keys=0), "max_keys must be in"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(LoadPredictor(2, 16))
