"""Which pages a token sequence finds, and for how long."""

import pytest

from runtime.cache.page_allocator import PageAllocator
from runtime.cache.prefix_cache import PrefixCache, page_hash, root_hash

SIZE = 4


def fill(cache: PrefixCache, pages: PageAllocator, token_ids: list[int], salt: str = "") -> list[int]:
    """Pages for the whole pages of token_ids, inserted and still held."""
    page_ids = pages.allocate(len(token_ids) // SIZE)
    name = root_hash(salt)
    for index, page_id in enumerate(page_ids):
        name = page_hash(name, token_ids[index * SIZE : (index + 1) * SIZE])
        cache.insert(name, page_id)
    cache.check_integrity()
    return page_ids


def test_the_longest_prefix_in_whole_pages():
    pages = PageAllocator(10)
    cache = PrefixCache(pages, SIZE)
    tokens = list(range(12))
    assert fill(cache, pages, tokens) == [1, 2, 3]
    assert cache.match(tokens, "", max_tokens=12) == [1, 2, 3]
    assert cache.match(tokens, "", max_tokens=11) == [1, 2]
    assert cache.match([*tokens, 99], "", max_tokens=12) == [1, 2, 3]
    assert cache.match(tokens[:7], "", max_tokens=99) == [1]
    assert cache.match([*tokens[:5], 99, *tokens[6:]], "", max_tokens=12) == [1]
    assert cache.match(tokens[4:], "", max_tokens=12) == []  # same tokens, other place
    assert cache.match([], "", max_tokens=0) == []


def test_salts_do_not_share():
    pages = PageAllocator(10)
    cache = PrefixCache(pages, SIZE)
    tokens = list(range(8))
    mine, yours = fill(cache, pages, tokens, "mine"), fill(cache, pages, tokens, "yours")
    assert cache.match(tokens, "mine", 8) == mine
    assert cache.match(tokens, "yours", 8) == yours
    assert cache.match(tokens, "", 8) == []


def test_a_released_page_is_found_until_it_is_handed_out():
    pages = PageAllocator(5)
    cache = PrefixCache(pages, SIZE)
    tokens = list(range(12))
    pages.release(fill(cache, pages, tokens))
    assert cache.match(tokens, "", 12) == [1, 2, 3]
    assert pages.allocate(2) == [4, 3]  # the blank page, then the end of the prefix
    assert cache.match(tokens, "", 12) == [1, 2]
    cache.check_integrity()
    pages.share([1, 2])
    assert pages.num_free == 0
    assert cache.match(tokens, "", 12) == [1, 2]


def test_the_first_page_of_a_prefix_stays_and_the_second_remains_private():
    pages = PageAllocator(6)
    cache = PrefixCache(pages, SIZE)
    tokens = [1, 2, 3, 4]
    name = page_hash(root_hash(""), tokens)
    first, second = pages.allocate(2)
    assert cache.insert(name, first)
    assert cache.insert(name, first)
    assert not cache.insert(name, second)
    assert cache.match(tokens, "", 4) == [first]
    pages.release([second])
    assert pages.free_list()[0] == second
    with pytest.raises(ValueError, match="full of another prefix"):
        cache.insert(page_hash(name, tokens), first)
    cache.check_integrity()


def test_clear_forgets_held_and_idle_pages():
    pages = PageAllocator(6)
    cache = PrefixCache(pages, SIZE)
    held, idle = fill(cache, pages, [1] * 4), fill(cache, pages, [2] * 8)
    pages.release(idle)
    cache.clear()
    assert len(cache) == pages.num_kept == 0
    assert cache.match([1] * 4, "", 4) == []
    pages.check_integrity()
    pages.release(held)
    assert pages.num_free == 5


def test_names_depend_on_every_token_and_on_token_borders():
    root = root_hash("")
    names = {page_hash(root, t) for t in ([1, 2], [2, 1], [12], [1, 2, 0], [258], [2, 1, 0], [1 << 20, 2])}
    assert len(names) == 7
    assert all(len(name) == 32 for name in names)
    assert root_hash("a") != root_hash("b")
