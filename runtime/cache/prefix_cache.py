"""PrefixCache: finds the pages that already hold the beginning of a token sequence. Imports no JAX.

Whole pages only. A page's name is a hash chained over everything before it, so equal names mean equal prefixes; the
chain starts from a salt, and sequences with different salts never share. Pages are counted by the PageAllocator:
this class holds no reference, and forgets a page when the allocator hands it out again.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from runtime.cache.page_allocator import PageAllocator

HASH_BYTES = 32  # a collision would show one user another's text: 256 bits


def root_hash(salt: str) -> bytes:
    """Start of every chain with this salt."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, person=b"kv-salt").digest()


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of one full page, given the name of the page before it (`root_hash` for the first)."""
    data = parent + array("q", token_ids).tobytes()
    return blake2b(data, digest_size=HASH_BYTES, person=b"kv-page").digest()


class PrefixCache:
    """Page ids by chained hash. Owned by one thread."""

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.page_size = page_size
        self._allocator = allocator
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        allocator.on_take = self._drop

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, name: bytes) -> bool:
        return name in self._page_of

    def match(self, token_ids: Sequence[int], salt: str, max_tokens: int) -> list[int]:
        """Pages of the longest cached prefix in whole pages, at most max_tokens long.

        No reference is taken: the caller shares the pages before anything else is allocated.
        """
        page_ids: list[int] = []
        name = root_hash(salt)
        for start in range(0, min(len(token_ids), max_tokens) - self.page_size + 1, self.page_size):
            name = page_hash(name, token_ids[start : start + self.page_size])
            if name not in self._page_of:
                break
            page_ids.append(self._page_of[name])
        return page_ids

    def match_hashes(self, names: Sequence[bytes], max_tokens: int) -> list[int]:
        """As `match`, for a chain that is hashed already."""
        page_ids: list[int] = []
        for name in names[: max(0, max_tokens) // self.page_size]:
            if name not in self._page_of:
                break
            page_ids.append(self._page_of[name])
        return page_ids

    def insert(self, name: bytes, page_id: int) -> bool:
        """Make a full, held page findable; its KV has been launched. False if that prefix has a page already.

        The page that came first stays, the other one remains private to its holder.
        """
        known = self._page_of.get(name)
        if known is not None:
            return known == page_id
        if page_id in self._hash_of:
            raise ValueError(f"page {page_id} is full of another prefix already")
        self._allocator.keep(page_id)
        self._page_of[name] = page_id
        self._hash_of[page_id] = name
        return True

    def clear(self) -> None:
        """Forget everything, for example because the weights changed."""
        for page_id in list(self._hash_of):
            self._drop(page_id)
            self._allocator.forget(page_id)

    def check_integrity(self) -> None:
        """Raises AssertionError unless both directions agree with each other and with the allocator's marks."""
        assert {p: n for n, p in self._page_of.items()} == self._hash_of, "hash and page maps differ"
        assert len(self._page_of) == self._allocator.num_kept, "kept pages and cached pages differ"

    def _drop(self, page_id: int) -> None:
        del self._page_of[self._hash_of.pop(page_id)]
