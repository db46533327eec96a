"""A layer with part of its experts resident is the layer with all of them, whatever sleeps, and says what it fetched."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router.spec import RouterSpec
from runtime.experts.asleep import Staged, fetch, foresee, part_resident_layer, wake_expert
from runtime.experts.layer import moe_layer
from runtime.experts.residency import AsleepColumn
from runtime.experts.weights import ExpertStore, MoEParams
from runtime.model.spec import host_memory

TOKENS, EXPERTS, SLOTS, TOP_K, WIDTH, EXPERT_WIDTH = 24, 12, 5, 3, 16, 8
ROUTING = RouterSpec(top_k=TOP_K)
OPTIONS = {"routing": ROUTING, "activation": "silu"}


def draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5)


def layer(seed: int, slot_experts: list[int], num_slots: int = SLOTS, num_staged: int = 0):
    """(all resident, part resident): slot s holds slot_experts[s]; -1 and missing ones are free, filled with noise."""
    rng = np.random.default_rng(seed)
    router = draw(rng, EXPERTS, WIDTH) * 4
    gate_up, down = draw(rng, EXPERTS, 2 * EXPERT_WIDTH, WIDTH), draw(rng, EXPERTS, WIDTH, EXPERT_WIDTH)
    whole = MoEParams(router, gate_up, down)
    table = np.full(EXPERTS, -1, np.int32)
    slots = [np.full((num_slots, *w.shape[1:]), np.nan, np.float32) for w in (gate_up, down)]
    for slot, expert in enumerate(slot_experts):
        if expert >= 0:
            table[expert] = slot
            slots[0][slot], slots[1][slot] = gate_up[expert], down[expert]
    stored = [jax.device_put(w, host_memory()) for w in (gate_up, down)]
    store = ExpertStore(*stored, jnp.asarray(table), num_staged)
    return whole, MoEParams(router, *map(jnp.asarray, slots), store=store)


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(7)
    return draw(rng, TOKENS, WIDTH) * 4, jnp.asarray(np.arange(TOKENS) % 5 != 3)


@pytest.mark.parametrize(
    ("slot_experts", "num_slots"),
    [
        ([], SLOTS),
        ([11, 3, -1, 0, 7], SLOTS),
        ([-1, -1, 6], SLOTS),
        (list(range(EXPERTS)), EXPERTS),
        ([4], 1),
    ],
    ids=["none", "some", "one", "all", "one slot"],
)
def test_what_sleeps_changes_nothing(slot_experts, num_slots, tokens) -> None:
    whole, part = layer(0, slot_experts, num_slots)
    x, is_real = tokens
    expected, load = moe_layer(whole, x, is_real, **OPTIONS)
    out, found, staged = jax.jit(lambda p, x, r: part_resident_layer(p, x, r, **OPTIONS))(part, x, is_real)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.tokens, load.tokens)
    np.testing.assert_array_equal(found.rows, load.rows)
    assert staged is None
    counts = np.asarray(load.tokens)
    asleep = np.setdiff1d(np.arange(EXPERTS), slot_experts)
    wanted = int((counts[asleep] > 0).sum())
    assert found.asleep.tolist() == [counts[asleep].sum(), 0, 0, wanted]
    assert not np.asarray(out)[~np.asarray(is_real)].any()


@pytest.mark.parametrize("ids", [[2, -1], [9, 2], [-1, -1]])
def test_what_was_fetched_ahead_is_used_first(ids, tokens) -> None:
    """Right guesses are not fetched again, wrong ones are counted; with poison where nothing may be read."""
    x, is_real = tokens
    whole, part = layer(1, [0, 1, -1, 3, 4], num_staged=2)
    expected, load = moe_layer(whole, x, is_real, **OPTIONS)
    counts = np.asarray(load.tokens).copy()
    assert counts[2] > 0
    poison = tuple(jnp.full(w.shape[1:], jnp.nan) for w in (whole.w_gate_up, whole.w_down))
    weights = tuple(fetch(part.store, jnp.int32(i)) if i >= 0 else poison for i in ids)
    staged = Staged(jnp.asarray(ids, jnp.int32), weights)
    # What is staged must come from there: the store's copy is poisoned.
    broken = jax.device_put(
        part.store.w_down.at[jnp.asarray([i for i in ids if i >= 0], int)].set(jnp.nan), host_memory()
    )
    part = replace(part, store=replace(part.store, w_down=broken))
    out, found, _ = part_resident_layer(part, x, is_real, staged=staged, **OPTIONS)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    right = sum(counts[i] > 0 for i in ids if i >= 0)
    late = sum(counts[i] > 0 for i in (2, *range(5, EXPERTS))) - right
    assert found.asleep is not None
    assert found.asleep[AsleepColumn.STAGED_USED :].tolist() == [
        right,
        sum(i >= 0 for i in ids) - right,
        late,
    ]


def test_foreseen_are_the_most_wanted_of_the_asleep(tokens) -> None:
    x, is_real = tokens
    whole, part = layer(2, [0, 1, 2, 3, 4], num_staged=3)
    counts = np.asarray(moe_layer(whole, x, is_real, **OPTIONS)[1].tokens).copy()
    counts[:5] = 0
    upcoming = foresee(part, x, is_real, ROUTING)
    found = np.asarray(upcoming.expert_ids)
    assert (np.sort(counts[found]) == np.sort(counts)[-3:]).all()
    assert foresee(whole, x, is_real, ROUTING) is None
    nobody = foresee(part, x, jnp.zeros(TOKENS, bool), ROUTING)
    assert nobody.expert_ids.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("num_real", [TOKENS, 0])
def test_the_next_layers_experts_come_with_this_layers_product(num_real, tokens) -> None:
    x, _ = tokens
    is_real = jnp.arange(TOKENS) < num_real
    _, this = layer(3, [0, 2], num_staged=2)
    _, following = layer(4, [1], num_staged=2)
    upcoming = foresee(following, x, is_real, ROUTING)
    _, _, staged = part_resident_layer(this, x, is_real, upcoming=upcoming, **OPTIONS)
    for expert, (gate_up, down) in zip(staged.expert_ids.tolist(), staged.weights, strict=True):
        assert (expert >= 0) == (num_real > 0)
        if expert >= 0:
            np.testing.assert_array_equal(gate_up, np.asarray(following.store.w_gate_up)[expert])
            np.testing.assert_array_equal(down, np.asarray(following.store.w_down)[expert])


def test_waking_writes_one_slot() -> None:
    _, part = layer(5, [0, 1, 2, 3, 4])
    before = np.asarray(part.w_gate_up).copy(), np.asarray(part.w_down).copy()
    after = wake_expert(part.w_gate_up, part.w_down, part.store, jnp.int32(9), jnp.int32(2))
    for old, new, stored in zip(before, after, (part.store.w_gate_up, part.store.w_down), strict=True):
        old[2] = np.asarray(stored)[9]
        np.testing.assert_array_equal(new, old)
