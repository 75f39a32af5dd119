import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hybridjax.serving.pools import PagePool, PoolError, SlotPool


class Pages(RuleBasedStateMachine):
    """The pool against a plain multiset of holders."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(9)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        held = {page for pages in self.holders for page in pages}
        pages = self.pool.allocate(count)
        if count > 8 - len(held):
            assert pages is None
        else:
            assert pages is not None and len(set(pages)) == count
            assert not held & set(pages) and 0 not in pages
            self.holders.append(pages)

    @rule(data=st.data())
    def share(self, data):
        if self.holders:
            pages = data.draw(st.sampled_from(self.holders))
            self.pool.share(pages)
            self.holders.append(list(pages))

    @rule(data=st.data())
    def release(self, data):
        if self.holders:
            self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule(page=st.integers(-1, 10))
    def double_free(self, page):
        if not any(page in pages for pages in self.holders):
            with pytest.raises(PoolError):
                self.pool.release([page])
            with pytest.raises(PoolError):
                self.pool.share([page])

    @invariant()
    def sums_to_capacity(self):
        held = {page for pages in self.holders for page in pages}
        assert self.pool.available + len(held) == self.pool.capacity == 8
        for page in range(9):
            assert self.pool.references(page) == sum(page in pages for pages in self.holders)
        self.pool.check_integrity()


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=25)


def test_allocation_is_all_or_nothing():
    pool = PagePool(4)
    assert pool.allocate(4) is None
    assert pool.available == 3
    assert sorted(pool.allocate(3) or []) == [1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_refused_call_changes_nothing():
    pool = PagePool(5)
    pages = pool.allocate(2)
    assert pages is not None
    free = next(page for page in range(1, 5) if page not in pages)
    for bad in ([*pages, free], [pages[0], pages[0]], [*pages, 0], [*pages, 99], [*pages, -1]):
        for call in (pool.release, pool.share):
            with pytest.raises(PoolError):
                call(bad)
    assert pool.available == 2
    assert [pool.references(page) for page in pages] == [1, 1]
    with pytest.raises(PoolError):
        pool.allocate(-1)


def test_slots():
    pool = SlotPool(3)
    assert pool.capacity == 2
    slots = [pool.allocate(), pool.allocate()]
    assert sorted(slots) == [1, 2]
    assert pool.allocate() is None
    pool.check_integrity()
    pool.release(1)
    for bad in (1, 0, 3, -1):
        with pytest.raises(PoolError):
            pool.release(bad)
    assert pool.allocate() == 1


def test_pools_need_more_than_nobodys_entry():
    for pool in (PagePool, SlotPool):
        with pytest.raises(PoolError):
            pool(1)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.pop(),
        lambda pool: pool._free.append(1),
        lambda pool: pool._references.__setitem__(1, -1),
        lambda pool: pool._references.__setitem__(0, 1),
        lambda pool: pool._references.__setitem__(1, 0),
        lambda pool: pool._references.__setitem__(pool._free[0], 1),
    ],
)
def test_planted_page_corruption_is_caught(corrupt):
    pool = PagePool(6)
    assert pool.allocate(2) == [1, 2]
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(PoolError):
        pool.check_integrity()


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.append(1),
        lambda pool: pool._free.pop(),
        lambda pool: pool._held.__setitem__(0, True),
        lambda pool: pool._held.__setitem__(1, False),
    ],
)
def test_planted_slot_corruption_is_caught(corrupt):
    pool = SlotPool(5)
    assert pool.allocate() == 1
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(PoolError):
        pool.check_integrity()
