"""The prefix cache: which prompt prefixes are in the pools, down to which state can be restored.

A tree over tokens, one node per full page. A node holds a reference to its page (keys, values and
compressed keys, which depend only on tokens up to the page's end) and may hold a *snapshot*: a slot
with the recurrent state after the page's last token. Attention can be resumed after any node, a
recurrence only where a snapshot lies, so a prompt is resumed at its deepest node with a snapshot and
recomputed from there. Snapshots are taken where they will be asked for: at the end of prompts, where
prompts were seen to branch, and sparsely along long ones.

The tree is keyed by the tokens themselves, so no collision can hand one prompt's state to another.
Ids only: memory is written by the device in the order of launches, so a page or slot may be handed on
while a step that reads it is still in flight.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from hybridjax.serving.pools import PagePool, PoolError, SlotPool


@dataclasses.dataclass(eq=False, slots=True)
class _Node:
    """One page of tokens under its parent. ``snapshot`` is a slot, 0 for none."""

    key: bytes
    parent: "_Node | None"
    page: int
    last_used: int = 0
    snapshot: int = 0
    locks: int = 0
    children: dict[bytes, "_Node"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Match:
    """What a prompt can reuse.

    Attributes:
      tokens: tokens that need not be computed again, a multiple of the page size, below the prompt's
        length; 0 for none.
      pages: their pages, in order.
      slot: the slot with the recurrent state after them, 0 if ``tokens`` is 0.
      branch: tokens whose pages are known, at least ``tokens``: where a snapshot was missed.
    """

    tokens: int = 0
    pages: tuple[int, ...] = ()
    slot: int = 0
    branch: int = 0


class PrefixCache:
    """Holds references to pages and slots of the pools it is given; see the module.

    Args:
      pages, slots: the pools, shared with running requests.
      page_size: tokens per page; snapshots lie on multiples of it.
    """

    def __init__(self, pages: PagePool, slots: SlotPool, page_size: int):
        self._pages, self._slots, self._page_size = pages, slots, page_size
        self._root = _Node(b"", None, 0)
        self._clock = itertools.count(1)
        self._serial = itertools.count()
        self._num_nodes = 0
        # Which nodes and snapshots there are: another number whenever that has changed.
        self._version = 0
        # Leaves by recency; entries that no longer describe a leaf are skipped when they come up.
        self._leaves: list[tuple[int, int, _Node]] = []
        # Nodes with a snapshot, least recently used first.
        self._snapshots: dict[_Node, None] = {}
        self._locked: list[_Node] = []

    @property
    def num_pages(self) -> int:
        """Pages that the cache holds a reference to."""
        return self._num_nodes

    @property
    def num_evictable_pages(self) -> int:
        """Pages that nobody else holds; a few more than can be freed now where requests hold deeper ones."""
        return self._pages.num_idle

    @property
    def num_snapshots(self) -> int:
        """Slots that the cache holds."""
        return len(self._snapshots)

    def follow(self, prompt: np.ndarray, salt: bytes = b"") -> "Followed":
        """What ``match`` would find for a prompt, to be asked again and again. Modifies nothing."""
        return Followed(self, prompt, salt)

    def match(self, prompt: np.ndarray, salt: bytes = b"") -> Match:
        """The deepest known state of a proper prefix of ``prompt`` (int[n], see Request.cache_ids).

        Only prefixes that were inserted with the same salt are found.

        Marks what it finds as used and locks the snapshot against eviction until ``unlock``. The
        caller takes its own references to the pages before it allocates anything.
        """
        path = list(self._walk(prompt, (len(prompt) - 1) // self._page_size, salt))
        depth = _restorable(path)
        branch = len(path) * self._page_size
        if path:
            self._touch(path[-1])
        if not depth:
            return Match(branch=branch)
        node = path[depth - 1]
        self._snapshots[node] = self._snapshots.pop(node)
        node.locks += 1
        self._locked.append(node)
        pages = tuple(n.page for n in path[:depth])
        return Match(depth * self._page_size, pages, node.snapshot, branch)

    def undo(self, match: Match) -> None:
        """Ends the protection of what ``match`` found last: the prompt is not admitted after all."""
        if match.tokens:
            self._locked.pop().locks -= 1

    def unlock(self) -> bool:
        """Ends the protection of all snapshots matched so far: the steps that read them are launched.

        Returns:
          whether there were any, so that more can be evicted now.
        """
        locked, self._locked = self._locked, []
        for node in locked:
            node.locks -= 1
        return bool(locked)

    def insert(self, prompt: np.ndarray, pages: list[int], tokens: int, salt: bytes = b"") -> None:
        """Adds the full pages of the first ``tokens`` tokens, which must have been computed.

        Takes a reference to each page that was not known. Where a node exists it keeps its own page, unless
        nobody else holds that: then the equal page of the request takes its place, which frees one and lets
        no request pin pages that it does not hold.
        """
        node = self._root
        for i in range(tokens // self._page_size):
            key = self._key(prompt, i, salt)
            child = node.children.get(key)
            if child is None:
                self._pages.cache(pages[i])
                child = node.children[key] = _Node(key, node, pages[i])
                self._num_nodes += 1
                self._version += 1
            elif child.page != pages[i] and self._pages.references(child.page) == 1:
                self._pages.cache(pages[i])
                self._pages.uncache(child.page)
                child.page = pages[i]
            node = child
        if node is not self._root:
            self._touch(node)

    def attach(self, prompt: np.ndarray, tokens: int, slot: int, salt: bytes = b"") -> bool:
        """Gives the node after ``tokens`` tokens its snapshot; takes over the slot if it returns True.

        False if the node is not known or has one already: the slot stays the caller's.
        """
        path = list(self._walk(prompt, tokens // self._page_size, salt))
        if tokens % self._page_size or not tokens or len(path) * self._page_size < tokens:
            return False
        node = path[-1]
        if node.snapshot:
            return False
        node.snapshot = slot
        self._snapshots[node] = None
        self._version += 1
        return True

    def has_snapshot(self, prompt: np.ndarray, tokens: int, salt: bytes = b"") -> bool:
        """Whether the state after the first ``tokens`` tokens is known. Modifies nothing."""
        path = list(self._walk(prompt, tokens // self._page_size, salt))
        return len(path) * self._page_size == tokens and bool(path) and bool(path[-1].snapshot)

    def evict_pages(self, count: int) -> int:
        """Frees up to ``count`` pages that nobody else holds, least recently used leaves first.

        Returns:
          how many were freed. Snapshots of the nodes go with them.
        """
        freed, kept = 0, []
        while freed < count and self._leaves:
            used, serial, node = heapq.heappop(self._leaves)
            if not _is_current((used, serial, node)):
                continue
            if node.locks or self._pages.references(node.page) > 1:
                kept.append((used, serial, node))
                continue
            self._remove(node)
            freed += 1
        for entry in kept:
            heapq.heappush(self._leaves, entry)
        return freed

    def evict_snapshot(self) -> bool:
        """Frees the slot of the least recently used snapshot that is not locked; False if there is none."""
        for node in self._snapshots:
            if not node.locks:
                self._drop_snapshot(node)
                return True
        return False

    def flush(self) -> None:
        """Forgets everything and gives all references back. Requests keep what they hold."""
        self.unlock()
        for node in list(self._nodes()):
            if node.snapshot:
                self._drop_snapshot(node)
            self._pages.uncache(node.page)
            node.parent = None
        self._root.children.clear()
        self._version += 1
        self._leaves.clear()
        self._num_nodes = 0

    def held_pages(self) -> list[int]:
        """The pages with a reference of the cache, each once."""
        return [node.page for node in self._nodes()]

    def held_slots(self) -> list[int]:
        """The slots of all snapshots."""
        return [node.snapshot for node in self._snapshots]

    def check_integrity(self) -> None:
        """Raises PoolError unless tree, snapshots and pools agree with each other. Modifies nothing."""
        nodes = list(self._nodes())
        pages = [node.page for node in nodes]
        slots = [node.snapshot for node in nodes if node.snapshot]
        if len(nodes) != self._num_nodes or len(set(pages)) != len(pages):
            raise PoolError("the prefix cache holds a page twice or has lost count of its nodes")
        if any(self._pages.references(page) < 1 for page in pages):
            raise PoolError("the prefix cache holds a free page")
        if len(set(slots)) != len(slots) or {n for n in nodes if n.snapshot} != set(self._snapshots):
            raise PoolError("the prefix cache has lost or doubled a snapshot")
        leaves = {node for _, _, node in self._leaves}
        for node in nodes:
            if any(child.parent is not node or key != child.key for key, child in node.children.items()):
                raise PoolError("a node of the prefix cache is filed under the wrong parent or tokens")
            if not node.children and node not in leaves:
                raise PoolError("a leaf of the prefix cache can never be evicted")
        if any(node.locks for node in nodes if node not in self._locked):
            raise PoolError("a node of the prefix cache is locked by nobody")

    def _key(self, prompt: np.ndarray, index: int, salt: bytes) -> bytes:
        """A page's tokens; the salt goes into the first page's key, so that it divides whole trees."""
        page = prompt[index * self._page_size : (index + 1) * self._page_size]
        tokens = page.astype(np.int64, copy=False).tobytes()
        return tokens if index else salt + tokens

    def _walk(self, prompt: np.ndarray, depth: int, salt: bytes) -> Iterator[_Node]:
        """The known nodes along the prompt's first ``depth`` pages."""
        node = self._root
        for i in range(depth):
            child = node.children.get(self._key(prompt, i, salt))
            if child is None:
                return
            yield child
            node = child

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _touch(self, node: _Node) -> None:
        node.last_used = next(self._clock)
        if not node.children:
            heapq.heappush(self._leaves, (node.last_used, next(self._serial), node))
        if len(self._leaves) > 2 * self._num_nodes + 64:
            # Every use of a leaf leaves its former entry behind; without this, hits alone would grow it.
            self._leaves = [entry for entry in self._leaves if _is_current(entry)]
            heapq.heapify(self._leaves)

    def _remove(self, node: _Node) -> None:
        """Takes a leaf out of the tree; its parent inherits the recency and may become a leaf."""
        parent = node.parent
        assert parent is not None
        if node.snapshot:
            self._drop_snapshot(node)
        del parent.children[node.key]
        node.parent = None
        self._num_nodes -= 1
        self._version += 1
        self._pages.uncache(node.page)
        if parent is not self._root and not parent.children:
            parent.last_used = max(parent.last_used, node.last_used)
            heapq.heappush(self._leaves, (parent.last_used, next(self._serial), parent))

    def _drop_snapshot(self, node: _Node) -> None:
        self._slots.release(node.snapshot)
        node.snapshot = 0
        self._version += 1
        del self._snapshots[node]


class Followed:
    """How much of one prompt a cache knows, without looking all of it up each time.

    While the tree is what it was, the answer is known. When it has changed, the pages seen before are there
    if the last of them is, as only leaves are evicted: only pages behind it are looked up.
    """

    def __init__(self, cache: PrefixCache, prompt: np.ndarray, salt: bytes):
        self._cache, self._prompt, self._salt = cache, prompt, salt
        self._most = (len(prompt) - 1) // cache._page_size
        self._node, self._depth = cache._root, 0
        self._version, self._tokens = -1, 0

    @property
    def tokens(self) -> int:
        """The tokens of ``PrefixCache.match``."""
        cache = self._cache
        if self._version == cache._version:
            return self._tokens
        node, depth = self._node, self._depth
        if node.parent is None:  # the root, or evicted
            node, depth = cache._root, 0
        while depth < self._most:
            child = node.children.get(cache._key(self._prompt, depth, self._salt))
            if child is None:
                break
            node, depth = child, depth + 1
        self._node, self._depth, self._version = node, depth, cache._version
        while node.parent is not None and not node.snapshot:
            node, depth = node.parent, depth - 1
        self._tokens = depth * cache._page_size
        return self._tokens


def _restorable(path: Iterable[_Node]) -> int:
    """Nodes of a path down to its deepest snapshot."""
    return max((i + 1 for i, node in enumerate(path) if node.snapshot), default=0)


def _is_current(entry: tuple[int, int, _Node]) -> bool:
    """Whether an entry still describes a leaf of the tree and its last use."""
    used, _, node = entry
    return node.parent is not None and not node.children and node.last_used == used
