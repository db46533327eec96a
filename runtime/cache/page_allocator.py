"""PageAllocator: which KV pages are free, and how many holders each other page has. Imports no JAX.

It knows page ids only, neither sequences nor tokens. A page may be marked as kept: it holds a prefix worth finding
again. A kept page that nobody holds counts as free, but is handed out last, the least recently released first, and
its owner (the prefix cache) is told.
"""

from collections.abc import Callable, Iterable, Sequence

DUMMY_PAGE = 0  # padding rows write here; never handed out


class PageAllocator:
    """Reference counts of pages 1 to num_pages - 1. Owned by one thread."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; at least 2 are needed, the first is the dummy page")
        self.num_pages = num_pages
        self.on_take: Callable[[int], None] | None = None  # told when a kept page is handed out, before it is
        self._refs = [0] * num_pages
        self._blank = list(range(num_pages - 1, DUMMY_PAGE, -1))  # a stack: the last one is handed out first
        self._idle: dict[int, None] = {}  # kept pages without holder, least recently released first
        self._kept: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out now, idle kept ones included."""
        return len(self._blank) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_free

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def ref_count(self, page_id: int) -> int:
        return self._refs[page_id]

    def free_list(self) -> list[int]:
        """Free pages in the order in which they will be handed out."""
        return [*reversed(self._blank), *self._idle]

    def allocate(self, num: int) -> list[int]:
        """`num` pages with one holder each. The caller has checked `num_free`."""
        if not 0 <= num <= self.num_free:
            raise ValueError(f"asked for {num} pages, {self.num_free} are free")
        page_ids = [self._take() for _ in range(num)]
        for page_id in page_ids:
            self._refs[page_id] = 1
        return page_ids

    def share(self, page_ids: Iterable[int]) -> None:
        """One more holder for pages that are held already, or kept and idle."""
        for page_id in page_ids:
            if self._refs[page_id] == 0:
                if page_id not in self._idle:
                    raise ValueError(f"page {page_id} is free and holds nothing to share")
                del self._idle[page_id]
            self._refs[page_id] += 1

    def release(self, page_ids: Sequence[int]) -> None:
        """One holder less for each page.

        Goes from the last page to the first, so that the end of a prefix is reused before its beginning.
        """
        for page_id in reversed(page_ids):
            if self._refs[page_id] <= 0:
                raise ValueError(f"page {page_id} is released but has no holder")
            self._refs[page_id] -= 1
            if self._refs[page_id] == 0:
                if page_id in self._kept:
                    self._idle[page_id] = None
                else:
                    self._blank.append(page_id)

    def keep(self, page_id: int) -> None:
        """Mark a held page: from now on it is reused last."""
        if self._refs[page_id] == 0:
            raise ValueError(f"page {page_id} has no holder and cannot be kept")
        self._kept.add(page_id)

    def forget(self, page_id: int) -> None:
        """Undo `keep`: the content is no longer worth anything."""
        self._kept.discard(page_id)
        if page_id in self._idle:
            del self._idle[page_id]
            self._blank.append(page_id)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page but the dummy is either held or free, exactly once."""
        free = self.free_list()
        assert len(free) == len(set(free)), f"pages twice in the free list: {free}"
        held = {page_id for page_id, refs in enumerate(self._refs) if refs > 0}
        assert min(self._refs) >= 0, "negative reference count"
        assert held.isdisjoint(free), f"held and free: {held & set(free)}"
        assert held | set(free) == set(range(1, self.num_pages)), "a page is lost, or the dummy page in use"
        assert self._kept.isdisjoint(self._blank), "a kept page is in the blank list"
        assert set(self._idle) <= self._kept, "an idle page is not kept"

    def _take(self) -> int:
        if self._blank:
            return self._blank.pop()
        page_id = next(iter(self._idle))
        if self.on_take is not None:
            self.on_take(page_id)
        del self._idle[page_id]
        self._kept.discard(page_id)
        return page_id
