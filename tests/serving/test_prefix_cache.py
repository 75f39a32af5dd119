"""The prefix cache: what it finds, what it holds, what it lets go, and that damage is noticed."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybridjax.serving.pools import PagePool, PoolError, SlotPool
from hybridjax.serving.prefix_cache import Match, PrefixCache

PAGE = 4


def tokens(text):
    return np.array([ord(c) for c in text], np.int32)


def cache_of(pages=20, slots=8):
    pools = PagePool(pages), SlotPool(slots)
    return PrefixCache(*pools, PAGE), *pools


def remember(cache, page_pool, slot_pool, text, *, snapshot=None):
    """Leaves a computed prompt to the cache, as a finished request does; returns its pages."""
    prompt = tokens(text)
    pages = page_pool.allocate(-(-len(prompt) // PAGE))
    cache.insert(prompt, pages, len(prompt))
    if snapshot is not None:
        slot = slot_pool.allocate()
        if not cache.attach(prompt, snapshot, slot):
            slot_pool.release(slot)
    page_pool.release(pages)
    return pages


def test_a_prompt_resumes_at_its_deepest_snapshot():
    cache, page_pool, slot_pool = cache_of()
    pages = remember(cache, page_pool, slot_pool, "abcdefghijkl", snapshot=8)
    match = cache.match(tokens("abcdefghijklmno"))
    assert match == Match(8, tuple(pages[:2]), match.slot, 12)
    assert match.slot in cache.held_slots()


def test_pages_without_a_snapshot_show_a_branch_but_restore_nothing():
    cache, page_pool, slot_pool = cache_of()
    remember(cache, page_pool, slot_pool, "abcdefgh")
    assert cache.match(tokens("abcdefghij")) == Match(branch=8)
    assert cache.match(tokens("abcdXXXXX")) == Match(branch=4)
    assert cache.match(tokens("Xbcdefgh")) == Match()


def test_a_whole_prompt_is_never_matched_whole():
    """One token at least has to be computed, for its logits."""
    cache, page_pool, slot_pool = cache_of()
    remember(cache, page_pool, slot_pool, "abcdefgh", snapshot=8)
    assert cache.match(tokens("abcdefgh")) == Match(branch=4)
    assert cache.match(tokens("abcdefghi")).tokens == 8


def test_of_two_equal_pages_the_one_in_use_is_kept():
    cache, page_pool, slot_pool = cache_of()
    first = remember(cache, page_pool, slot_pool, "abcdefgh")
    page_pool.share(first[1:])  # somebody reads the second page
    prompt = tokens("abcdefgh")
    second = page_pool.allocate(2)
    cache.insert(prompt, second, len(prompt))
    assert cache.held_pages() == [second[0], first[1]]
    page_pool.release(second)
    page_pool.release(first[1:])
    assert (cache.num_pages, cache.num_evictable_pages) == (2, 2)
    assert page_pool.available == 19 - 2


def test_no_request_pins_pages_that_it_does_not_hold():
    """Else it could wait for ever for pages that only it keeps from being evicted."""
    cache, page_pool, slot_pool = cache_of(pages=8)
    remember(cache, page_pool, slot_pool, "abcdefgh")
    own = page_pool.allocate(4)
    cache.insert(tokens("abcdefghijklmnop"), own, 16)
    assert sorted(cache.held_pages()) == sorted(own)
    assert page_pool.available == 7 - 4


def test_prefixes_are_shared_only_under_the_same_salt():
    cache, page_pool, slot_pool = cache_of()
    for salt in (b"", b"one", b"two"):
        assert cache.match(tokens("abcdefgh"), salt) == Match()
        pages, slot = page_pool.allocate(2), slot_pool.allocate()
        cache.insert(tokens("abcdefgh"), pages, 8, salt)
        assert cache.attach(tokens("abcdefgh"), 4, slot, salt)
        page_pool.release(pages)
        match = cache.match(tokens("abcdefgh"), salt)
        assert (match.slot, match.pages) == (slot, tuple(pages[:1]))
        assert cache.follow(tokens("abcdefgh"), salt).tokens == 4
        assert cache.has_snapshot(tokens("abcd"), 4, salt)
    assert cache.num_pages == 6
    cache.check_integrity()


def test_a_partial_page_is_not_remembered():
    cache, page_pool, slot_pool = cache_of()
    remember(cache, page_pool, slot_pool, "abcdef")
    assert cache.num_pages == 1


def test_the_least_recently_used_leaf_goes_first():
    cache, page_pool, slot_pool = cache_of()
    remember(cache, page_pool, slot_pool, "abcdefgh", snapshot=8)
    remember(cache, page_pool, slot_pool, "abcdIJKL", snapshot=8)
    cache.match(tokens("abcdefgh?"))
    cache.unlock()
    assert cache.evict_pages(1) == 1
    assert cache.match(tokens("abcdIJKL?")).branch == 4
    assert cache.match(tokens("abcdefgh?")).tokens == 8
    cache.unlock()
    assert cache.evict_pages(9) == 2
    assert (cache.num_pages, cache.num_snapshots) == (0, 0)
    assert slot_pool.available == slot_pool.capacity


def test_what_a_request_holds_is_not_evicted():
    cache, page_pool, slot_pool = cache_of()
    remember(cache, page_pool, slot_pool, "abcdefgh", snapshot=8)
    match = cache.match(tokens("abcdefghi"))
    page_pool.share(match.pages)
    assert cache.evict_pages(2) == 0
    assert not cache.evict_snapshot()
    cache.unlock()
    assert cache.evict_pages(2) == 0
    assert cache.evict_snapshot()
    page_pool.release(match.pages)
    assert cache.evict_pages(2) == 2


def test_a_second_snapshot_of_the_same_state_is_refused():
    cache, page_pool, slot_pool = cache_of()
    remember(cache, page_pool, slot_pool, "abcdefgh", snapshot=4)
    slot = slot_pool.allocate()
    assert not cache.attach(tokens("abcdefgh"), 4, slot)
    assert not cache.attach(tokens("abcdWXYZ"), 8, slot)
    assert not cache.attach(tokens("abcdefgh"), 6, slot)
    assert cache.attach(tokens("abcdefgh"), 8, slot)
    assert cache.has_snapshot(tokens("abcdefgh"), 8)


def test_hits_alone_do_not_make_the_cache_grow():
    cache, page_pool, slot_pool = cache_of()
    pages = remember(cache, page_pool, slot_pool, "abcdefgh", snapshot=8)
    for _ in range(500):
        cache.match(tokens("abcdefghi"))
        cache.unlock()
        cache.insert(tokens("abcdefgh"), pages, 8)
    assert len(cache._leaves) <= 2 * cache.num_pages + 65
    cache.check_integrity()
    assert cache.evict_pages(5) == 2


def test_flush_gives_everything_back_but_what_requests_hold():
    cache, page_pool, slot_pool = cache_of()
    remember(cache, page_pool, slot_pool, "abcdefgh", snapshot=8)
    match = cache.match(tokens("abcdefghi"))
    page_pool.share(match.pages)
    cache.flush()
    cache.check_integrity()
    assert cache.match(tokens("abcdefghi")) == Match()
    assert page_pool.available == page_pool.capacity - 2
    page_pool.release(match.pages)
    assert page_pool.available == page_pool.capacity


@pytest.mark.parametrize(
    "damage", ["page freed", "snapshot lost", "wrong key", "count", "lock", "parent", "leaf"]
)
def test_planted_damage_is_noticed(damage):
    cache, page_pool, slot_pool = cache_of()
    remember(cache, page_pool, slot_pool, "abcdefgh", snapshot=8)
    cache.check_integrity()
    root_child = next(iter(cache._root.children.values()))
    leaf = next(iter(root_child.children.values()))
    if damage == "page freed":
        page_pool.uncache(leaf.page)
    elif damage == "snapshot lost":
        cache._snapshots.clear()
    elif damage == "wrong key":
        root_child.children = {b"other": leaf}
    elif damage == "count":
        cache._num_nodes += 1
    elif damage == "lock":
        leaf.locks = 1
    elif damage == "parent":
        leaf.parent = cache._root
    else:
        cache._leaves.clear()
    with pytest.raises(PoolError):
        cache.check_integrity()


def test_what_is_followed_is_looked_up_once_and_then_only_where_the_tree_has_grown():
    cache, page_pool, slot_pool = cache_of(pages=100)
    prompt = "".join(chr(97 + i % 26) for i in range(82))
    remember(cache, page_pool, slot_pool, prompt[:40], snapshot=40)
    looked = []
    key = cache._key
    cache._key = lambda prompt, index, salt: looked.append(index) or key(prompt, index, salt)
    followed = [cache.follow(tokens(prompt[:80] + end)) for end in "xyz"]

    def ask():
        looked.clear()
        found = {one.tokens for one in followed}
        return found, list(looked)

    assert ask() == ({40}, [*range(11)] * 3), "the known pages, and the first that is not"
    assert ask() == ({40}, [])
    remember(cache, page_pool, slot_pool, prompt, snapshot=60)
    assert ask() == ({60}, [*range(10, 20)] * 3)
    cache.evict_snapshot()
    assert ask() == ({60}, []), "it was not theirs"
    cache.evict_snapshot()
    assert ask() == ({0}, [])
    # Pages go, the last first: what was followed that far is followed anew.
    cache.evict_pages(1)
    assert ask() == ({0}, [*range(20)] * 3)
    remember(cache, page_pool, slot_pool, "other things")
    assert ask() == ({0}, [19] * 3)
    cache.flush()
    assert ask() == ({0}, [0] * 3)


class Histories(RuleBasedStateMachine):
    """Prompts over two letters against a dictionary that remembers every state by its tokens."""

    def __init__(self):
        super().__init__()
        self.cache, self.pages, self.slots = cache_of(pages=14, slots=5)
        self.content = {}  # page or slot -> the tokens whose state it holds
        self.held = []
        self.followed = []

    @rule(text=st.text("ab", min_size=1, max_size=22), salt=st.sampled_from([b"", b"", b"a"]))
    def follow(self, text, salt):
        self.followed.append((text, salt, self.cache.follow(tokens(text), salt)))

    @precondition(lambda self: self.followed)
    @rule(data=st.data())
    def ask(self, data):
        """Asked for the first time or again, after whatever changes, it knows what a match finds."""
        text, salt, followed = data.draw(st.sampled_from(self.followed))
        tokens_ = followed.tokens
        match = self.cache.match(tokens(text), salt)
        self.cache.undo(match)
        assert tokens_ == match.tokens == followed.tokens

    @rule(text=st.text("ab", min_size=1, max_size=22), snapshot=st.integers(0, 5))
    def run(self, text, snapshot):
        """Admission, computation and confirmation of one prompt, as the scheduler does them."""
        prompt = tokens(text)
        match = self.cache.match(prompt)
        for i, page in enumerate(match.pages):
            assert self.content["page", page] == text[: (i + 1) * PAGE]
        if match.tokens:
            assert match.tokens < len(text)
            assert self.content["slot", match.slot] == text[: match.tokens]
        assert match.branch >= match.tokens == len(match.pages) * PAGE
        self.pages.share(match.pages)
        need = -(-len(text) // PAGE) - len(match.pages)
        self.cache.evict_pages(max(0, need - self.pages.available))
        fresh = self.pages.allocate(need)
        self.cache.unlock()
        if fresh is None:
            self.pages.release(match.pages)
            return
        pages = [*match.pages, *fresh]
        for i, page in enumerate(pages):
            if page in fresh:
                self.content["page", page] = text[: (i + 1) * PAGE]
        self.cache.insert(prompt, pages, len(text))
        position = snapshot * PAGE
        if 0 < position <= len(text) and (self.slots.available or self.cache.evict_snapshot()):
            slot = self.slots.allocate()
            self.content["slot", slot] = text[:position]
            if not self.cache.attach(prompt, position, slot):
                self.slots.release(slot)
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data):
        self.pages.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(count=st.integers(0, 4))
    def evict(self, count):
        assert self.cache.evict_pages(count) <= count

    @rule()
    def flush(self):
        self.cache.flush()
        assert self.cache.num_pages == self.cache.num_snapshots == 0

    @invariant()
    def pools_add_up(self):
        self.cache.check_integrity()
        self.pages.check_integrity()
        self.slots.check_integrity()
        used = {page for pages in self.held for page in pages} | set(self.cache.held_pages())
        assert len(used) + self.pages.available == self.pages.capacity
        assert len(self.cache.held_slots()) + self.slots.available == self.slots.capacity


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
