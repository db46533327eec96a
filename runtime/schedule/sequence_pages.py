"""SequencePages: gives pages to sequences and takes them back; joins allocator and prefix cache. Imports no JAX."""

from collections.abc import Iterable

from runtime.cache.page_allocator import PageAllocator
from runtime.cache.prefix_cache import PrefixCache, page_hash, root_hash
from runtime.errors import InvalidRequest
from runtime.schedule.sequence import Sequence

NOTHING_TO_OFFER = 1 << 62  # leading pages of a sequence that count as offered: more than it ever has


class SequencePages:
    """Owner of both caches on behalf of the scheduler."""

    def __init__(self, num_pages: int, page_size: int, enable_prefix_cache: bool) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.prefix_cache = PrefixCache(self.allocator, page_size)
        self._is_enabled = enable_prefix_cache

    @property
    def num_free(self) -> int:
        return self.allocator.num_free

    def set_prefix_cache(self, enabled: bool) -> None:
        self._is_enabled = enabled
        if not enabled:
            self.prefix_cache.clear()

    def forget(self, holders: Iterable[Sequence]) -> None:
        """Clear the cache, because weights or KV have changed under it. What the holders have computed, and what they will
        compute from it, is offered to nobody; one that starts anew computes all of it and offers again."""
        self.prefix_cache.clear()
        for sequence in holders:
            if sequence.page_ids:
                sequence.num_offered_pages = NOTHING_TO_OFFER

    def num_pages(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)

    def check_fits(self, sequence: Sequence) -> None:
        """Raises InvalidRequest if the pool could not hold the sequence even alone."""
        num_pages = self.num_pages(sequence.max_len - 1)  # the last token gets no KV
        if num_pages > self.allocator.num_pages - 1:
            raise InvalidRequest(
                f"the request needs {num_pages} KV pages, the pool has {self.allocator.num_pages - 1}",
                param="max_tokens",
            )

    def can_match(self, sequence: Sequence) -> bool:
        # Log probabilities of the prompt need every position computed.
        return self._is_enabled and sequence.request.params.prompt_logprobs is None

    def match(self, sequence: Sequence) -> tuple[list[int], bytes | None]:
        """Cached pages of a waiting sequence's prefill, and the name of the first page that it would have to
        compute although another sequence could share it. Never the whole prefill: its last position is computed.
        """
        if not self.can_match(sequence):
            return [], None
        self._extend_hashes(sequence, sequence.prefill_len)
        max_tokens = sequence.prefill_len - 1
        page_ids = self.prefix_cache.match_hashes(sequence.page_hashes, max_tokens)
        has_more = len(page_ids) < max_tokens // self.page_size
        return page_ids, sequence.page_hashes[len(page_ids)] if has_more else None

    def names_to_compute(self, sequence: Sequence) -> Iterable[bytes]:
        """Names of the full pages that a sequence in prefill has yet to launch."""
        if not self._is_enabled:
            return ()
        return sequence.page_hashes[sequence.num_offered_pages : sequence.prefill_end // self.page_size]

    def admission_cost(self, sequence: Sequence, cached: list[int]) -> int:
        """Pages that leave the free list when the sequence's whole prefill gets its pages."""
        num_idle = sum(self.allocator.ref_count(page_id) == 0 for page_id in cached)
        return self.num_pages(sequence.prefill_len) - len(cached) + num_idle

    def num_missing(self, sequence: Sequence, end: int) -> int:
        """Pages the sequence lacks to hold positions [0, end)."""
        return max(0, self.num_pages(end) - len(sequence.page_ids))

    def attach(self, sequence: Sequence, cached: list[int]) -> None:
        """Start a sequence's pages with cached ones. Attach all of a step before growing any: growing evicts."""
        self.allocator.share(cached)
        sequence.page_ids = list(cached)
        sequence.num_offered_pages = len(cached)

    def grow(self, sequence: Sequence, end: int) -> None:
        """Add the pages for positions [0, end); the caller has checked that they are free."""
        sequence.page_ids += self.allocator.allocate(self.num_missing(sequence, end))

    def offer(self, sequence: Sequence) -> None:
        """Make the sequence's settled full pages findable. Whoever matches them is launched later, hence runs on
        the device after the step that writes them."""
        if not self._is_enabled:
            return
        self._extend_hashes(sequence, sequence.num_settled)
        for index in range(sequence.num_offered_pages, sequence.num_settled // self.page_size):
            self.prefix_cache.insert(sequence.page_hashes[index], sequence.page_ids[index])
            sequence.num_offered_pages = index + 1

    def num_lost(self, sequence: Sequence) -> int:
        """Positions that would have to be computed again if the sequence gave its pages back now."""
        max_tokens = min(sequence.num_scheduled, sequence.prefill_len - 1) if self.can_match(sequence) else 0
        kept = self.prefix_cache.match_hashes(sequence.page_hashes, max_tokens)
        return sequence.num_scheduled - len(kept) * self.page_size

    def release(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.page_ids)
        sequence.page_ids = []
        sequence.num_offered_pages = 0

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the reference counts are exactly what the holders account for."""
        self.allocator.check_integrity()
        self.prefix_cache.check_integrity()
        refs = [0] * self.allocator.num_pages
        for sequence in holders:
            assert len(set(sequence.page_ids)) == len(sequence.page_ids), "a page twice in one sequence"
            assert self.num_missing(sequence, sequence.num_scheduled) == 0, "positions without a page"
            for page_id in sequence.page_ids:
                refs[page_id] += 1
        for page_id, count in enumerate(refs):
            assert self.allocator.ref_count(page_id) == count, f"page {page_id}: leaked or lost a reference"

    def _extend_hashes(self, sequence: Sequence, end: int) -> None:
        names = sequence.page_hashes
        for start in range(len(names) * self.page_size, end - self.page_size + 1, self.page_size):
            parent = names[-1] if names else root_hash(sequence.request.cache_salt)
            names.append(page_hash(parent, sequence.token_ids(start, start + self.page_size)))
