"""Copies share the rows of a step: no row goes astray, and the busiest device never gets more for it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runtime.experts.copies import copies_table
from runtime.experts.placement import ExpertPlacement
from runtime.experts.shares import STEP_ROUNDS, device_loads, slot_shares
from runtime.experts.sharing import (
    CopyTable,
    label_rows,
    row_ends,
    slots_by_own_rows,
    slots_of_labels,
)

EXPERTS, DEVICES, SLOTS, TOKENS, TOP_K = 8, 4, 3, 6, 2  # slots of a device, tokens of a device


def random_placement(rng: np.random.Generator) -> ExpertPlacement:
    """Experts dealt out in random order, spare slots filled with experts that the device does not hold."""
    rows = []
    for part in np.array_split(rng.permutation(EXPERTS), DEVICES):
        others = [e for e in rng.permutation(EXPERTS) if e not in part]
        rows += [*part, *others[: SLOTS - len(part)]]
    return ExpertPlacement(np.array([rows]), DEVICES, EXPERTS)


def table_of(placement: ExpertPlacement, weight: float) -> CopyTable:
    return CopyTable(jnp.asarray(copies_table(placement)[0]), jnp.float32(weight), placement.num_slots)


@jax.jit
def shared_by_all(copies: CopyTable, ids: jax.Array, is_real: jax.Array) -> jax.Array:
    """[devices, tokens, k] slots of expert ids by device, as every device of `gather` sees them."""
    labels = jax.vmap(partial(label_rows, copies))(ids, is_real)
    return slots_of_labels(copies, labels, ids[0].size).reshape(ids.shape)


@jax.jit
def shared_by_own(copies: CopyTable, ids: jax.Array, is_real: jax.Array) -> jax.Array:
    devices = jnp.arange(DEVICES)
    return jax.vmap(lambda i, r, d: slots_by_own_rows(copies, i, r, d))(ids, is_real, devices)


@jax.jit
def rows_of_devices(copies: CopyTable, counts: jax.Array) -> jax.Array:
    ends = row_ends(copies, counts, 1 << 20, jnp.uint32(0))
    return jnp.diff(ends, axis=1, prepend=0).sum(axis=0)


def routing(rng: np.random.Generator, skew: float) -> tuple[np.ndarray, np.ndarray]:
    """Distinct experts of each token, and which tokens are real."""
    rates = rng.random(EXPERTS) ** skew
    ids = [
        [rng.choice(EXPERTS, TOP_K, replace=False, p=rates / rates.sum()) for _ in range(TOKENS)]
        for _ in range(DEVICES)
    ]
    return np.array(ids, np.int32), rng.random((DEVICES, TOKENS)) < 0.8


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 4.0]), st.sampled_from([0.0, 0.25, 0.5]))
@settings(deadline=None)
def test_every_row_gets_a_slot_of_its_expert_and_padding_none(seed, skew, weight):
    rng = np.random.default_rng(seed)
    placement = random_placement(rng)
    ids, is_real = routing(rng, skew)
    for share in (shared_by_all, shared_by_own):
        slots = np.asarray(share(table_of(placement, weight), ids, is_real))
        held = np.append(placement.slot_experts[0], -1)[slots]
        assert (held == np.where(is_real[..., None], ids, -1)).all()


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 3000), min_size=EXPERTS, max_size=EXPERTS),
    st.sampled_from([0.1, 0.5]),
)
@settings(deadline=None)
def test_the_busiest_device_never_gets_more_rows_for_it(seed, counts, weight):
    placement = random_placement(np.random.default_rng(seed))
    equal, levelled = (
        np.asarray(rows_of_devices(table_of(placement, w), np.array(counts, np.int32))) for w in (0, weight)
    )
    assert levelled.sum() == equal.sum() == sum(counts)
    assert levelled.max() <= equal.max()


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 3000), min_size=EXPERTS, max_size=EXPERTS))
@settings(deadline=None)
def test_rows_are_those_of_the_hosts_shares_but_for_whole_rows(seed, counts):
    """Weight 0: equal shares. 0.5: as level as the same rounds on the host, which keep the best on the way."""
    placement = random_placement(np.random.default_rng(seed))
    loads = np.array([counts], float)
    assume(loads.sum() > 0)
    equal = np.asarray(rows_of_devices(table_of(placement, 0), np.array(counts, np.int32)))
    np.testing.assert_allclose(equal, device_loads(placement, loads)[0], atol=SLOTS)
    levelled = np.asarray(rows_of_devices(table_of(placement, 0.5), np.array(counts, np.int32)))
    by_host = slot_shares(placement, loads, 0.5, STEP_ROUNDS)
    wanted = device_loads(placement, loads, by_host)[0].max()
    assert levelled.max() <= wanted + SLOTS + 0.02 * loads.sum() / DEVICES


def test_two_copies_of_a_hot_expert_level_the_devices():
    """Expert 0, with 12 rows, on both devices; the second has 4 rows of its own more: 8 and 4 of them, then 8 each."""
    placement = ExpertPlacement(np.array([[0, 1, 0, 2]]), 2, 3)
    counts = jnp.array([12, 2, 6], jnp.int32)
    found = {
        weight: row_ends(table_of(placement, weight), counts, 64, jnp.uint32(0)).tolist()
        for weight in (0, 0.25, 0.5)
    }
    # Device 0 ends at the first number; expert 2 lies on device 1 only.
    assert found == {
        0: [[6, 12], [2, 2], [0, 6]],
        0.25: [[7, 12], [2, 2], [0, 6]],
        0.5: [[8, 12], [2, 2], [0, 6]],
    }


def test_single_rows_use_all_copies_of_their_expert():
    """Every device has one row for expert 0, which lies on all four: each slot takes one."""
    placement = ExpertPlacement(np.array([[0, 1, 0, 2, 0, 3, 0, 4]]), 4, 5)
    ids = np.zeros((DEVICES, 1, 1), np.int32)
    for share in (shared_by_all, shared_by_own):
        slots = share(table_of(placement, 0), ids, np.ones((DEVICES, 1), bool))
        assert sorted(np.asarray(slots).ravel().tolist()) == [0, 2, 4, 6]


def test_odd_rows_go_to_other_copies_in_other_steps():
    """One row for expert 0 a step, with other rows beside it: over many steps both copies take about half."""
    placement = ExpertPlacement(np.array([[0, 1, 0, 2, 3, 4, 5, 6]]), 4, 7)
    taken = []
    for seed in range(40):
        others = np.random.default_rng(seed).integers(1, 7, (DEVICES, TOKENS, 1)).astype(np.int32)
        others[0, 0] = 0
        slots = shared_by_all(table_of(placement, 0), others, np.ones((DEVICES, TOKENS), bool))
        taken.append(int(slots[0, 0, 0]))
    assert set(taken) == {0, 2}
    assert 10 <= taken.count(0) <= 30


def test_without_copies_the_table_is_all_there_is():
    placement = ExpertPlacement(np.array([[2, 0, 1, 3]]), 2, 4)
    ids = np.array([[[2, 3]], [[0, 1]]], np.int32)
    slots = shared_by_all(table_of(placement, 0.5), ids, np.array([[True], [False]]))
    assert np.asarray(slots).tolist() == [[[0, 3]], [[4, 4]]]


def test_the_largest_steps_fit_into_the_numbers():
    """2 ** 20 rows of one expert on two devices of which one is idle else."""
    placement = ExpertPlacement(np.array([[0, 1, 0, 2]]), 2, 3)
    counts = jnp.array([1 << 19, 1 << 19, 0], jnp.int32)
    ends = row_ends(table_of(placement, 0.5), counts, 1 << 20, jnp.uint32(0))
    assert ends[0, 1] == 1 << 19
    assert ends[0, 0] <= 1 << 13
