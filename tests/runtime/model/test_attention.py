"""Decode attention against a softmax over plain arrays, at row counts on both sides of the change of block size."""

import jax.numpy as jnp
import numpy as np
import pytest

from runtime.model import attention
from runtime.model.attention import attend_decode

PAGE, KV_HEADS, HEADS, DIM = 16, 2, 4, 8
LENGTHS = [0, 1, 64, 65, 128, 151]  # an empty row, and both sides of where blocks end


def softmax_attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One row: q [H, Dh], keys and values [K, T, Dh]."""
    keys, values = (np.repeat(a, HEADS // KV_HEADS, axis=0) for a in (keys, values))
    scores = np.einsum("hd,htd->ht", q, keys) * DIM**-0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,htd->hd", weights / weights.sum(axis=1, keepdims=True), values)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("window", [None, 70])
def test_decode_equals_softmax_over_the_row(
    monkeypatch: pytest.MonkeyPatch, is_large: bool, window: int | None
) -> None:
    monkeypatch.setattr(attention, "LARGE_TURN", 0 if is_large else 2**62)
    rng = np.random.default_rng(0)
    pages_a_row = 10
    shape = (len(LENGTHS), KV_HEADS, pages_a_row * PAGE, DIM)
    keys, values = rng.standard_normal((2, *shape)).astype(np.float32)
    for row, length in enumerate(LENGTHS):  # what lies past the end is stale, and must not reach a result
        keys[row, :, length:] = values[row, :, length:] = np.nan
    # [B, 2, K, P, S, Dh] to pages: page 0 is the dummy, the others are dealt out in a random order
    kv = np.stack([keys, values], axis=1).reshape(len(LENGTHS), 2, KV_HEADS, pages_a_row, PAGE, DIM)
    table = 1 + rng.permutation(len(LENGTHS) * pages_a_row).reshape(len(LENGTHS), pages_a_row)
    pages = np.full((table.size + 1, 2, KV_HEADS, PAGE, DIM), np.nan, np.float32)
    pages[table] = kv.transpose(0, 3, 1, 2, 4, 5)
    q = rng.standard_normal((len(LENGTHS), HEADS, DIM)).astype(np.float32)

    out = attend_decode(jnp.asarray(q), jnp.asarray(pages), jnp.asarray(table), jnp.array(LENGTHS), window)

    assert not out[0].any()
    for row, length in enumerate(LENGTHS[1:], start=1):
        seen = slice(0 if window is None else max(0, length - window), length)
        want = softmax_attention(q[row], keys[row, :, seen], values[row, :, seen])
        np.testing.assert_allclose(out[row], want, rtol=1e-5, atol=1e-5)


def test_only_large_turns_on_cpu_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = jnp.zeros((1, 2, 8, 16, 64))
    for platform, want in (("cpu", [128, 128, 64, 64]), ("gpu", [128] * 4)):
        monkeypatch.setattr(attention.jax, "default_backend", lambda name=platform: name)
        assert [attention._keys_a_turn(rows, pages) for rows in (1, 8, 16, 32)] == want
