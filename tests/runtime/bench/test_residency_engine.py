"""The bench's engines are those of the server: same text, rows counted; and its figures point the way they say."""

from types import SimpleNamespace
from typing import Any

import pytest

from runtime.bench.expert_skew import EXPERTS, LAYERS, TOP_K, VOCABULARY, write_skewed_model
from runtime.bench.residency_engine import (
    NUM_TOKENS,
    PROMPT_LEN,
    ROWS,
    Served,
    Variant,
    _config,
    _figures,
    _requests,
    _variants,
)


def test_variants_are_shares_of_the_models_experts_and_all_comes_once() -> None:
    assert [(v.resident, v.prefetch) for v in _variants(16)] == [
        (16, 0), (12, 0), (12, 2), (8, 0), (8, 2), (4, 0), (4, 2),
    ]  # fmt: skip
    assert [v.resident for v in _variants(1)] == [1]
    assert len({v.name for v in [Variant(0), *_variants(16)]}) == 8


def test_batches_differ_and_are_the_same_for_every_engine() -> None:
    first, again, other = _requests(100, 1), _requests(100, 1), _requests(100, 2)
    assert first == again
    assert [r.prompt_ids for r in first] != [r.prompt_ids for r in other]
    assert {r.params.temperature for r in first} == {0.0, 0.8}


def test_a_variant_twice_as_fast_has_twice_the_speed_and_another_word_is_seen() -> None:
    rates = {"all": [100.0, 50.0, 80.0], "8 resident, 0 ahead": [200.0, 100.0, 160.0]}
    texts = {"all": [[[1, 2], [3, 4]]], "8 resident, 0 ahead": [[[1, 2], [3, 5]]]}
    engine: Any = SimpleNamespace(residency=None)
    found = _figures(Variant(8), engine, rates, texts)
    assert found["speed_over_all"]["median"] == pytest.approx(2.0)
    assert found["tokens_s"] == 160.0
    assert (found["same_text"], found["equal_tokens"]) == (False, 0.75)
    assert _figures(Variant(0), engine, rates, texts)["same_text"]


def test_part_of_the_experts_writes_what_all_of_them_write_and_every_row_is_counted(tmp_path) -> None:
    write_skewed_model(tmp_path)
    engines = {v.name: Served(_config(v, "fp32"), tmp_path) for v in (Variant(0), Variant(4, 1))}
    try:
        batch = _requests(VOCABULARY, 0)
        texts = {name: [engine.serve(batch)[0]] for name, engine in engines.items()}
        texts["all"].append(engines["all"].serve(batch)[0])
    finally:
        for engine in engines.values():
            engine.close()
    assert texts["all"][0] == texts["all"][1], "a batch starts from an empty prefix cache"
    name, part = list(engines.items())[1]
    assert texts[name][0] == texts["all"][0]
    assert part.residency is not None
    status = part.residency.status()
    positions = ROWS * (PROMPT_LEN + NUM_TOKENS - 1)  # the last token goes into no step
    assert status.resident_rows + status.asleep_rows == positions * LAYERS * TOP_K
    found = _figures(
        Variant(4, 1), part, {"all": [1.0], name: [1.0]}, {"all": texts["all"][:1], name: texts[name]}
    )
    assert found["same_text"]
    assert 0 < found["hit_rate"] < 1
    assert found["prefetch_recall"] == pytest.approx(
        status.prefetches_used / (status.prefetches_used + status.late_fetches), abs=1e-4
    )
    assert part.expert_bytes == 3 * 64 * 16 * 4
    assert status.host_bytes == LAYERS * EXPERTS * part.expert_bytes
