"""Where keys and values go, on pages small enough to write down."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.xla import read_pages
from runtime.cache.kv_pool import (
    abstract_kv_pool,
    bytes_per_page,
    make_kv_pool,
    write_pages,
    write_tokens,
)
from runtime.model.architecture import from_hf_config
from tests.runtime.model.builders import QWEN3_CONFIG

ARCH = from_hf_config(QWEN3_CONFIG)  # 2 layers, 2 key-value heads of 8


def counting(num_tokens: int, start: float = 0.0) -> jnp.ndarray:
    """[T, 2, 8], each token's value its number, plus a tenth for the second head."""
    tokens = start + np.arange(num_tokens, dtype=np.float32).reshape(-1, 1, 1)
    return jnp.asarray(
        np.broadcast_to(tokens + np.array([0, 0.1], np.float32).reshape(1, 2, 1), (num_tokens, 2, 8))
    )


def test_sizes_follow_from_the_description() -> None:
    pool = make_kv_pool(ARCH, num_pages=5, page_size=4, dtype=jnp.bfloat16)
    assert (pool.num_pages, pool.page_size, len(pool.pages)) == (5, 4, 2)
    assert (
        bytes_per_page(ARCH, 4, jnp.bfloat16) == 2 * 2 * 2 * 4 * 8 * 2
    )  # layers, k and v, heads, tokens, channels
    assert (
        pool.nbytes
        == abstract_kv_pool(ARCH, 5, 4, jnp.bfloat16).nbytes
        == 5 * bytes_per_page(ARCH, 4, jnp.bfloat16)
    )


def test_whole_pages_are_written_and_read_back() -> None:
    pages = make_kv_pool(ARCH, 6, 4, jnp.float32).pages[0]
    pages = write_pages(pages, counting(8), counting(8, start=100), jnp.array([5, 2]))
    k, v = read_pages(pages, jnp.array([[5, 2]]), jnp.ones((1, 8), bool))
    assert k[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    np.testing.assert_allclose(v[0, 1, :, 3], np.arange(100.1, 108), rtol=1e-6)
    assert not pages[jnp.array([0, 1, 3, 4])].any()


def test_single_tokens_are_written_and_invalid_places_read_as_zero() -> None:
    pages = jnp.full_like(make_kv_pool(ARCH, 4, 4, jnp.float32).pages[0], jnp.nan)
    pages = write_tokens(pages, counting(2, 7), counting(2, 9), jnp.array([1, 3]), jnp.array([0, 2]))
    is_valid = jnp.array([[True, False, False, False], [False, False, True, False]])
    k, v = read_pages(pages, jnp.array([[1], [3]]), is_valid)
    assert k[:, 0, :, 0].tolist() == [[7, 0, 0, 0], [0, 0, 8, 0]]
    assert v[:, 0, :, 7].tolist() == [[9, 0, 0, 0], [0, 0, 10, 0]]
