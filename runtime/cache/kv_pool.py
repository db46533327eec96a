"""KVPool: keys and values on the device, in pages. Who owns which page is the host's business.

One array a layer holds both: a token is written with one scatter, and a page moves between levels as one piece.
Heads come before positions, so that a head's keys of one page lie together.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

DUMMY_PAGE = 0  # padding writes here; nothing that is read from it reaches a result


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPool:
    """pages: for each layer [num_pages, 2, num_kv_heads, page_size, head_dim]; [:, 0] keys, [:, 1] values."""

    pages: tuple[Any, ...]  # jax.Array, or what describes one

    @property
    def num_pages(self) -> int:
        return self.pages[0].shape[0]

    @property
    def page_size(self) -> int:
        return self.pages[0].shape[3]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(p.shape) * p.dtype.itemsize for p in self.pages)


class PagedModel(Protocol):
    """What of an architecture fixes the size of its pages."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def abstract_kv_pool(arch: PagedModel, num_pages: int, page_size: int, dtype: DTypeLike) -> KVPool:
    """KVPool of jax.ShapeDtypeStruct."""
    shape = (num_pages, 2, arch.num_kv_heads, page_size, arch.head_dim)
    return KVPool((jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),) * arch.num_layers)


def make_kv_pool(arch: PagedModel, num_pages: int, page_size: int, dtype: DTypeLike) -> KVPool:
    """Pages of zeros."""
    abstract = abstract_kv_pool(arch, num_pages, page_size, dtype)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract)


def bytes_per_page(arch: PagedModel, page_size: int, dtype: DTypeLike) -> int:
    """Bytes that one page takes over all layers."""
    return abstract_kv_pool(arch, 1, page_size, dtype).nbytes


def write_pages(
    pages: Float[Array, "N 2 K S Dh"],
    k: Float[Array, "T K Dh"],
    v: Float[Array, "T K Dh"],
    page_ids: Int[Array, " M"],
) -> Float[Array, "N 2 K S Dh"]:
    """Fills whole pages: tokens [m * S, (m + 1) * S) go to page page_ids[m], T = M * S."""
    num_slots, page_size = page_ids.shape[0], pages.shape[3]
    with jax.named_scope("kv_write"):
        kv = jnp.stack([k, v], axis=1).astype(pages.dtype)  # [T, 2, K, Dh]
        kv = kv.reshape(num_slots, page_size, *kv.shape[1:])
        return pages.at[page_ids].set(kv.transpose(0, 2, 3, 1, 4))


def write_tokens(
    pages: Float[Array, "N 2 K S Dh"],
    k: Float[Array, "B K Dh"],
    v: Float[Array, "B K Dh"],
    page_ids: Int[Array, " B"],
    offsets: Int[Array, " B"],
) -> Float[Array, "N 2 K S Dh"]:
    """Writes one token a row: row b at place offsets[b] of page page_ids[b]."""
    with jax.named_scope("kv_write"):
        return pages.at[page_ids, :, :, offsets].set(jnp.stack([k, v], axis=1).astype(pages.dtype))
