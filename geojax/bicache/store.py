# SPDX-License-Identifier: Apache-2.0
"""Prefixes that requests share: segments of tokens, each built after the segments before it.

An entry is one segment of one prefix: its keys and values in the layers below the deepest depth,
and its hidden state at each depth, in pages. Its key is the hash of its parent's key, of its tokens
and of all else that they follow from: the model's revision, the type, the builder, and a salt, by
which tenants are kept apart. A first 100 tokens that were built together with 900 more are not the
prefix of another request, so segments are whole, and a chain of them is what a prefix is.

Invariant: what an entry holds follows from its key. An entry with children or users is never
evicted. The oldest others are; under quotas those alone that are of the tenant who wants pages.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import numpy as np
from jaxtyping import Int32

from geojax.bicache.pages import CrowdedError, NoPagesError, Pages, QuotaError, pages_of
from geojax.config import require

Segments = Sequence[Sequence[int] | Int32[np.ndarray, " n"]]
Builder = Literal["prefix", "canvas"]
"""prefix: a pass over the segment after its parents. canvas: the same with masks behind it, as many
as requests like this one have, so that its rows have seen a canvas."""


@dataclass(eq=False)
class Entry:
    """One segment. Pages are the store's; arrays are on the host."""

    key: bytes
    parent: "Entry | None"
    tokens: Int32[np.ndarray, " n"]
    salt: str
    kv: Int32[np.ndarray, "depth j"]
    """Key/value pages of each layer below the deepest depth."""
    hidden: Int32[np.ndarray, "depths j"]
    """Hidden pages at each depth."""
    users: int = 0
    """Requests that read it."""
    children: int = 0
    pins: int = 0
    """How often it was asked to be kept."""
    used: int = 0
    """When it was last wanted, by the store's own count."""
    ready: threading.Event = field(default_factory=threading.Event)

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def busy(self) -> bool:
        return self.users > 0 or self.children > 0 or not self.ready.is_set()

    def chain(self) -> "list[Entry]":
        """From the first segment to this one."""
        found, entry = [], self
        while entry:
            found.append(entry)
            entry = entry.parent
        return found[::-1]


@dataclass
class Counts:
    """What happened since the store was made."""

    hits: int = 0
    builds: int = 0
    waits: int = 0
    """For a build that another request had begun."""
    evictions: int = 0
    built_rows: int = 0


class Store:
    """Entries of one model, one type and one set of depths."""

    def __init__(
        self,
        kv: Pages,
        hidden: Pages,
        page: int,
        depth: int,
        depths: int,
        revision: str,
        quota_pages: int | None = None,
    ):
        """`depth`: layers whose keys and values are kept; `depths`: hidden states of each row;
        `revision` names the model and the type; `quota_pages`: key/value pages a salt may hold."""
        self._kv, self._hidden, self._page = kv, hidden, page
        self.depth, self._depths, self._revision = depth, depths, revision
        self.quota = quota_pages
        self._entries: dict[bytes, Entry] = {}
        self._clock = 0
        self._lock = threading.RLock()
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    @property
    def kv_pages(self) -> int:
        return sum(entry.kv.size for entry in self._entries.values())

    @property
    def hidden_pages(self) -> int:
        return sum(entry.hidden.size for entry in self._entries.values())

    @property
    def idle_pages(self) -> int:
        """Key/value pages that may go, whoever wants them."""
        with self._lock:
            return sum(entry.kv.size for entry in self._idle(None))

    def keys(self, segments: Segments, salt: str, builder: str) -> list[bytes]:
        """The key of each segment of a prefix. `builder` names all that a build follows from
        beside the tokens."""
        keys, parent = [], f"{self._revision}\0{salt}\0{builder}".encode()
        for tokens in segments:
            body = np.asarray(tokens, np.int32).tobytes()
            parent = hashlib.sha256(hashlib.sha256(parent).digest() + body).digest()
            keys.append(parent)
        return keys

    def acquire(
        self,
        segments: Segments,
        salt: str,
        builder: str,
        build: Callable[[Entry], None],
    ) -> list[Entry]:
        """The chain of a prefix, held until `release`; what is missing is built.

        `build` fills the pages of an entry, whose parents are ready. One caller builds an entry,
        others wait for it. NoPagesError where pages are wanting although all that may go has gone.
        """
        chain: list[Entry] = []
        try:
            for tokens, key in zip(segments, self.keys(segments, salt, builder), strict=True):
                chain.append(self._hold(key, chain[-1] if chain else None, tokens, salt, build))
        except BaseException:
            self.release(chain)
            raise
        return chain

    def stored(self, segments: Segments, salt: str, builder: str) -> list[Entry]:
        """As much of a prefix's chain as is there; nobody holds it."""
        with self._lock:
            keys = self.keys(segments, salt, builder)
            there = takewhile(
                lambda k: k in self._entries and self._entries[k].ready.is_set(), keys
            )
            return [self._entries[key] for key in there]

    def release(self, chain: Sequence[Entry]) -> None:
        with self._lock:
            for entry in chain:
                assert entry.users > 0, "an entry is released that nobody uses"
                entry.users -= 1
                if not entry.users and self._entries.get(entry.key) is not entry:  # forgotten
                    self._give(entry)

    def longest(
        self,
        prompt: Sequence[int] | Int32[np.ndarray, " n"],
        salt: str,
        builder: str,
        ends: Sequence[int] | None = None,
    ) -> list[int]:
        """Where the segments of the longest stored prefix of `prompt` end; [] where there is none.

        `ends`: where segments may end, as at a conversation's messages; None: anywhere.
        """
        given = np.asarray(prompt, np.int32)
        with self._lock:
            by_parent: dict[bytes | None, list[Entry]] = {}
            for entry in self._entries.values():
                if entry.salt == salt and entry.ready.is_set():
                    parent = entry.parent.key if entry.parent else None
                    by_parent.setdefault(parent, []).append(entry)
        first = {entry.key for entry in by_parent.get(None, [])}
        best, open_ = list[int](), list[tuple[bytes | None, list[int]]]([(None, [])])
        while open_:
            parent, found = open_.pop()
            at = found[-1] if found else 0
            if at > (best[-1] if best else 0):
                best = found
            for entry in by_parent.get(parent, []):
                end = at + entry.rows
                if (
                    (ends is None or end in ends)
                    and end <= len(given)
                    and np.array_equal(entry.tokens, given[at:end])
                    and (entry.key not in first or self._is_root(entry, salt, builder))
                ):
                    open_.append((entry.key, [*found, end]))
        return best

    def _is_root(self, entry: Entry, salt: str, builder: str) -> bool:
        """Whether a first segment is of this builder; those after it are then, too."""
        return self.keys([entry.tokens], salt, builder)[0] == entry.key

    def pin(self, chain: Sequence[Entry], pinned: bool = True) -> None:
        """Keep entries whatever else is wanted, until each was let go as often as it was kept."""
        with self._lock:
            for entry in chain:
                entry.pins = max(entry.pins + (1 if pinned else -1), 0)

    def purge(self, salt: str | None = None) -> int:
        """Evict what nobody uses, of one tenant or of all; how many entries went."""
        with self._lock:
            gone = 0
            while victim := self._oldest(lambda e: salt is None or e.salt == salt, pinned=True):
                self._evict(victim)
                gone += 1
            return gone

    def forget(self) -> None:
        """Drop all entries, since what they hold is gone; the pages of those in use come back when
        they are released."""
        with self._lock:
            for entry in list(self._entries.values()):
                if entry.users:
                    del self._entries[entry.key]
                else:
                    self._drop(entry)

    def make_room(self, kv_pages: int, hidden_pages: int = 0, salt: str = "") -> None:
        """Evict until so many pages are free, the oldest first; under quotas those of `salt` only.

        NoPagesError, and nothing is evicted, where what is in use or others' stands against it.
        """
        with self._lock:
            self._check_room(kv_pages, hidden_pages, salt)
            while self._kv.free < kv_pages or self._hidden.free < hidden_pages:
                self._evict_oldest(salt)

    def _check_room(self, kv_pages: int, hidden_pages: int, salt: str) -> None:
        idle = self._idle(salt)
        kv = self._kv.free + sum(entry.kv.size for entry in idle)
        hidden = self._hidden.free + sum(entry.hidden.size for entry in idle)
        if kv < kv_pages or hidden < hidden_pages:
            message = (
                f"{kv_pages} key/value and {hidden_pages} hidden pages are wanted, "
                f"{self._kv.free} and {self._hidden.free} are free, and {kv} and {hidden} can be"
            )
            theirs = [e for e in self._entries.values() if self.quota and e.salt != salt]
            most_kv = self._kv.count - 1 - sum(entry.kv.size for entry in theirs)
            most_hidden = self._hidden.count - 1 - sum(entry.hidden.size for entry in theirs)
            if theirs and (kv_pages > most_kv or hidden_pages > most_hidden):
                raise CrowdedError(
                    f"{message}; prefixes of others stay, within their quotas: lower these, or "
                    "raise the pool's bytes"
                )
            raise NoPagesError(f"{message}; wait for requests to end, or raise the pool's bytes")

    def _idle(self, salt: str | None) -> list[Entry]:
        """What may go for the sake of `salt`, sooner or later: what neither a user nor a pin keeps,
        and under quotas no other tenant's; None: for whosever."""
        kept: set[bytes] = set()
        for entry in self._entries.values():
            if entry.users or entry.pins or not entry.ready.is_set():
                kept |= {e.key for e in entry.chain()}
        mine = [e for e in self._entries.values() if not self.quota or salt in (None, e.salt)]
        return [e for e in mine if e.key not in kept]

    def _evict_oldest(self, salt: str) -> None:
        victim = self._oldest(lambda entry: not self.quota or entry.salt == salt)
        assert victim, "there is as much as was counted"
        self._evict(victim)

    def _hold(self, key: bytes, parent: Entry | None, tokens, salt: str, build) -> Entry:
        with self._lock:
            self._clock += 1
            entry = self._entries.get(key)
            mine = entry is None
            if mine:
                entry = self._new(key, parent, tokens, salt)
            else:
                self.counts.hits += entry.ready.is_set()
                self.counts.waits += not entry.ready.is_set()
            entry.used, entry.users = self._clock, entry.users + 1
        if not mine:
            entry.ready.wait()
            if self._entries.get(key) is not entry:  # its build failed
                with self._lock:
                    entry.users -= 1
                return self._hold(key, parent, tokens, salt, build)
            return entry
        try:
            build(entry)
        except BaseException:
            with self._lock:
                entry.users -= 1
                self._drop(entry)
            entry.ready.set()
            raise
        self.counts.builds += 1
        self.counts.built_rows += entry.rows
        entry.ready.set()
        return entry

    def _new(self, key: bytes, parent: Entry | None, tokens, salt: str) -> Entry:
        tokens = np.array(tokens, np.int32)
        require(len(tokens), "a segment of 0 tokens is wanted; leave it out")
        pages = pages_of(len(tokens), self._page)
        kv, hidden = self.depth * pages, self._depths * pages
        # Its parents are held by the caller, so they stay.
        if self.quota is not None:
            require(
                kv <= self.quota,
                f"a segment of {len(tokens)} tokens takes {kv} pages, more than the quota of "
                f"{self.quota}; raise it, or send the segment in parts",
            )
            held = self._held(salt)
            fixed = held - sum(entry.kv.size for entry in self._idle(salt))
            if fixed + kv > self.quota:
                raise QuotaError(
                    f"salt {salt!r} holds {held} pages, {fixed} of them in use or pinned, wants "
                    f"{kv} more, and its quota is {self.quota}; wait, or raise it"
                )
        self._check_room(kv, hidden, salt)  # before anything goes
        while self.quota is not None and self._held(salt) + kv > self.quota:
            self._evict_oldest(salt)
        self.make_room(kv, hidden, salt)
        entry = Entry(
            key,
            parent,
            tokens,
            salt,
            self._kv.take(kv).reshape(self.depth, pages),
            self._hidden.take(hidden).reshape(self._depths, pages),
        )
        self._entries[key] = entry
        if parent:
            parent.children += 1
        return entry

    def _held(self, salt: str) -> int:
        return sum(entry.kv.size for entry in self._entries.values() if entry.salt == salt)

    def _oldest(self, of: Callable[[Entry], bool], pinned: bool = False) -> Entry | None:
        idle = (e for e in self._entries.values() if not e.busy and (pinned or not e.pins))
        return min(filter(of, idle), key=lambda entry: entry.used, default=None)

    def _evict(self, entry: Entry) -> None:
        self.counts.evictions += 1
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        self._give(entry)

    def _give(self, entry: Entry) -> None:
        self._kv.give(entry.kv)
        self._hidden.give(entry.hidden)
        if entry.parent:
            entry.parent.children -= 1
