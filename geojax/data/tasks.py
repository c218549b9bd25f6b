# SPDX-License-Identifier: Apache-2.0
"""Scored tasks for a masked diffusion model: requests on a prefix, each with one right answer.

Invariant: row n is a pure function of (n, seed, seq_len, mixture), by hashes of integers; no
generator holds a state. A request's answer is a function of the tokens before its canvas alone, so
all rows of a canvas may be decoded at once.

    BEGIN s s s ... s | function page key THIS key key | a a ... a END ... END
    prefix, P tokens  | private, 6 tokens              | canvas: min(n, 12) answers among n tokens

Each symbol of a prefix is the one before it plus one of four steps, so that a hidden one can be
restored from those beside it. A page is 12 rows, and answer i is a function of the prefix at its
row P - 12 page - 6 + i: pages are counted from the prefix's end, so that they lie equally far from
every canvas.

The key says in chains which symbols point how far on, and in a prefix with blanks which symbol each
blank repeats. All keys are there, in any order, and it is the one after THIS: a row far away, to
which their order is nothing before those rows have looked around themselves, learns nothing of it.
So a prefix's rows can make no use of the key in their first layer.

In training blanks are filled where they are as well, by rows of the prefix itself, which know how
with the request only: what such a row holds in deep layers is not that of the prefix alone. Where
an answer is asked for, they stay masked.

Shapes: b rows, T tokens a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64, UInt64

from geojax.config.base import require
from geojax.data.masking import GOLDEN, below, mix

SYMBOLS = 16
"""Ids below are symbols, and are the numbers that they stand for."""
STEPS = np.array([1, 3, 6, 11])
"""What may be added, modulo SYMBOLS, from one symbol of a prefix to the next."""
PRIVATE = 6
"""Tokens between prefix and canvas."""
PAGE = 12
"""Rows of a page, and most symbols of an answer."""
PAGES = 3
KEYS = 3
GAP = 4
"""Rows from a blank to the next. A blank repeats the symbol 1 + key rows before it."""
REACH = 6
"""Rows after a page that an answer may depend on."""
SHORTEST = 1 + PAGE + REACH
"""Tokens of the shortest prefix, which holds one page."""


Symbols = Int64[np.ndarray, "b T"]
Rows = Int64[np.ndarray, "b n"]
Keys = Int64[np.ndarray, "b"]


@dataclass(frozen=True)
class Task:
    """A function from a row of the prefix to one symbol."""

    name: str
    answer: Callable[[Symbols, Rows, Keys], Rows]
    """(a prefix with no blanks, rows of one page in order, key) -> a symbol of each."""


def _at(symbols: Symbols, rows: Rows) -> Rows:
    return np.take_along_axis(symbols, rows, 1)


def _chain(hops: int) -> Callable[[Symbols, Rows, Keys], Rows]:
    """The symbol `hops` hops on: one row from a symbol below 4 (key + 1), two from another."""

    def answer(symbols: Symbols, rows: Rows, key: Keys) -> Rows:
        for _ in range(hops):
            rows = rows + 1 + (_at(symbols, rows) >= 4 * (key[:, None] + 1))
        return _at(symbols, rows)

    return answer


def _rank(symbols: Symbols, rows: Rows, key: Keys) -> Rows:
    """How many symbols of the page are smaller."""
    page = _at(symbols, rows)
    return (page[:, None, :] < page[:, :, None]).sum(2)


def _recall(symbols: Symbols, rows: Rows, key: Keys) -> Rows:
    """The symbol after the last earlier row that has the same symbol; without one, the symbol."""
    here, at = _at(symbols, rows), np.arange(symbols.shape[1])
    same = (symbols[:, None] == here[..., None]) & (at >= 1) & (at < rows[..., None])
    last = same.shape[2] - 1 - same[..., ::-1].argmax(2)
    return np.where(same.any(2), _at(symbols, np.minimum(last + 1, at[-1])), here)


TASKS = (
    Task("copy", lambda symbols, rows, key: _at(symbols, rows)),
    Task("shift", lambda symbols, rows, key: _at(symbols, rows + 1)),
    Task("max", lambda symbols, rows, key: np.maximum(_at(symbols, rows), _at(symbols, rows + 1))),
    Task("sum", lambda symbols, rows, key: (_at(symbols, rows) + _at(symbols, rows + 1)) % SYMBOLS),
    Task("hop1", _chain(1)),
    Task("hop2", _chain(2)),
    Task("hop3", _chain(3)),
    # The key, as often as there are rows: what hops and blanks must know first.
    Task("key", lambda symbols, rows, key: np.broadcast_to(key[:, None], rows.shape)),
    Task("rank", _rank),
    Task("recall", _recall),
    # A copy of a page with blanks in it.
    Task("fill", lambda symbols, rows, key: _at(symbols, rows)),
)
FUNCTION_IDS = SYMBOLS
"""Id that names the first task; the others follow, then pages, then keys."""
PAGE_IDS = FUNCTION_IDS + len(TASKS)
KEY_IDS = PAGE_IDS + PAGES
BEGIN, THIS, END, MASK = range(KEY_IDS + KEYS, KEY_IDS + KEYS + 4)
VOCAB = MASK + 1
_FILL = len(TASKS) - 1

# Draws of a row: its own, and from _FIRST_STEP on one for each of its places.
(
    *(_TOTAL, _SHARE, _KIND, _TASK, _SYMBOL, _PAGE, _KEY, _ORDER, _BLANK),
    _FIRST_STEP,
) = range(10)
_ORDERS = np.array(list(permutations(range(KEYS))))
_SHARES = (0.45, 0.92)  # of a request's tokens that are its prefix
_EXAMPLES = 1 << 32  # what seeds of examples are moved by, so that no training row is among them


class TaskRows(NamedTuple):
    """Documents and requests, with nothing hidden yet."""

    tokens: Int32[np.ndarray, "b T"]
    """END at padding."""
    maskable: Bool[np.ndarray, "b T"]
    """What may be hidden; of examples, what is: the canvas, and blanks."""
    real: Bool[np.ndarray, "b T"]
    task: Int32[np.ndarray, "b"]
    """Place in TASKS; -1 for a document, which is a prefix alone."""
    prefix_len: Int32[np.ndarray, "b"]
    answer_start: Int32[np.ndarray, "b"]
    """First row of the canvas; of a document, its end."""
    answer_stop: Int32[np.ndarray, "b"]
    """First row after the answer's symbols."""


@dataclass(frozen=True)
class Mixture:
    """Shares of training rows."""

    documents: float = 0.1
    """Prefixes alone, of which any token but BEGIN may be hidden."""
    whole: float = 0.1
    """Requests of which any token but BEGIN may be hidden; of the others, canvas and blanks."""
    weights: tuple[float, ...] = (1.0, 1.0, 1.0, 0.5, 0.5, 0.3, 0.3, 0.5, 0.3, 0.3, 2.5)
    """How often each task is asked, in the order of TASKS."""

    def __post_init__(self):
        require(
            min(self.documents, self.whole) >= 0 and self.documents + self.whole <= 1,
            f"documents {self.documents} and whole {self.whole} are shares of all rows and must "
            "lie in 0..1 together; lower one",
        )
        require(
            len(self.weights) == len(TASKS) and min(self.weights) >= 0 < max(self.weights),
            f"weights {self.weights} must be {len(TASKS)} numbers, none negative and one above 0",
        )


def make_rows(
    samples: UInt64[np.ndarray, "b"], seed: int, seq_len: int, mixture: Mixture = Mixture()
) -> TaskRows:
    """Training rows of these numbers: lengths from seq_len / 2 to seq_len, any prefix share."""
    fewest = 2 * (SHORTEST + PRIVATE + 1)
    require(
        seq_len >= fewest, f"seq_len {seq_len} is too short for the tasks; use {fewest} or more"
    )
    draws = _Draws(samples, seed)
    total = draws.integer(_TOTAL, seq_len // 2, seq_len)
    low, high = _SHARES
    prefix_len = np.rint((low + (high - low) * draws.unit(_SHARE)) * total).astype(np.int64)
    prefix_len = np.clip(prefix_len, SHORTEST, total - PRIVATE - 1)
    kind = draws.unit(_KIND)
    document = kind < mixture.documents
    shares = np.cumsum(mixture.weights) / np.sum(mixture.weights)
    task = np.searchsorted(shares[:-1], draws.unit(_TASK), side="right")
    task, prefix_len = np.where(document, -1, task), np.where(document, total, prefix_len)
    rows = _rows(draws, task, prefix_len, total, seq_len)
    whole = ~document & (kind < mixture.documents + mixture.whole)
    seen = rows.real & (np.arange(seq_len) > 0)
    return rows._replace(maskable=rows.maskable | whole[:, None] & seen)


def make_examples(task: str, share: float | None, count: int, seed: int, seq_len: int) -> TaskRows:
    """Requests of one task, seq_len tokens each, round(share * seq_len) of them its prefix; without
    a share, of all lengths that training rows have.

    Example i has the same prefix in every task of one share and seed, but for blanks. No training
    row of any seed below 2**32 is made by the same draws.
    """
    names = [t.name for t in TASKS]
    require(task in names, f"there is no task {task!r}; use one of {', '.join(names)}")
    numbers, seed = np.arange(count, dtype=np.uint64), seed + _EXAMPLES
    if share is None:
        weights = tuple(float(name == task) for name in names)
        return make_rows(numbers, seed, seq_len, Mixture(0.0, 0.0, weights))
    prefix_len, longest = round(share * seq_len), seq_len - PRIVATE - 1
    require(
        SHORTEST <= prefix_len <= longest,
        f"a share of {share} makes a prefix of {prefix_len} of {seq_len} tokens, which must be "
        f"{SHORTEST}..{longest}; change the share or seq_len",
    )
    draws = _Draws(numbers, seed)
    same = np.ones(count, np.int64)
    return _rows(draws, names.index(task) * same, prefix_len * same, seq_len * same, seq_len)


def asked(rows: TaskRows) -> Int32[np.ndarray, "b T"]:
    """Tokens of requests as a model is given them: answers and blanks are masked."""
    return np.where(rows.maskable, MASK, rows.tokens).astype(np.int32)


def exact_match(rows: TaskRows, decoded: Int32[np.ndarray, "b T"]) -> Bool[np.ndarray, "b"]:
    """Whether every symbol of the answer is right; what follows it in its canvas is free."""
    at = np.arange(decoded.shape[1])
    free = (at < rows.answer_start[:, None]) | (at >= rows.answer_stop[:, None])
    return ((decoded == rows.tokens) | free).all(1)


class _Draws:
    """Hashes of (seed, row, place)."""

    def __init__(self, samples: UInt64[np.ndarray, "b"], seed: int):
        self._keys = mix(mix(np.array([seed], np.uint64)) + samples * GOLDEN)

    def bits(self, places: np.ndarray) -> UInt64[np.ndarray, "b n"]:
        return mix(self._keys[:, None] + places.astype(np.uint64) * GOLDEN)

    def integer(self, place: int, low: int, high: np.ndarray | int) -> Int64[np.ndarray, "b"]:
        """One of low..high."""
        return low + below(self.bits(np.array([place]))[:, 0], np.asarray(high) - low + 1)

    def unit(self, place: int) -> Float64[np.ndarray, "b"]:
        """In [0, 1)."""
        return (self.bits(np.array([place]))[:, 0] >> np.uint64(32)) / 2**32


def _rows(
    draws: _Draws,
    task: Int64[np.ndarray, "b"],
    prefix_len: Int64[np.ndarray, "b"],
    total: Int64[np.ndarray, "b"],
    seq_len: int,
) -> TaskRows:
    at = np.arange(seq_len)
    request = task >= 0
    start = np.where(request, prefix_len + PRIVATE, total)
    stop = np.minimum(start + PAGE, total)
    steps = STEPS[below(draws.bits(_FIRST_STEP + at), np.array(len(STEPS)))]
    symbols = (draws.integer(_SYMBOL, 0, SYMBOLS - 1)[:, None] + np.cumsum(steps, 1)) % SYMBOLS
    key = draws.integer(_KEY, 0, KEYS - 1)
    blank = (at >= GAP) & (at < prefix_len[:, None]) & (task == _FILL)[:, None]
    blank &= (at + draws.integer(_BLANK, 0, GAP - 1)[:, None]) % GAP == 0
    source = np.maximum(at - (1 + key)[:, None], 0)
    symbols = np.where(blank, np.take_along_axis(symbols, source, 1), symbols)
    page = draws.integer(_PAGE, 1, np.minimum((prefix_len - 1 - REACH) // PAGE, PAGES))

    first = (prefix_len - PAGE * page - REACH)[:, None]
    answers = np.zeros((len(task), PAGE), np.int64)
    for place, each in enumerate(TASKS):
        mine = task == place
        if mine.any():
            answers[mine] = each.answer(symbols[mine], first[mine] + np.arange(PAGE), key[mine])

    tokens = np.where(at < prefix_len[:, None], symbols, END)
    tokens[:, 0] = BEGIN
    listed = KEY_IDS + _ORDERS[draws.integer(_ORDER, 0, len(_ORDERS) - 1)]
    at_key = (listed == KEY_IDS + key[:, None]).argmax(1)[:, None]
    marked = np.arange(KEYS + 1)
    keys = np.take_along_axis(listed, np.minimum(marked - (marked > at_key), KEYS - 1), 1)
    keys = np.where(marked == at_key, THIS, keys)
    private = (FUNCTION_IDS + task, PAGE_IDS + page - 1, *keys.T)
    for i, ids in enumerate(private):
        tokens = np.where(
            request[:, None] & (at == (prefix_len + i)[:, None]), ids[:, None], tokens
        )
    spread = np.take_along_axis(answers, np.clip(at - start[:, None], 0, PAGE - 1), 1)
    tokens = np.where((at >= start[:, None]) & (at < stop[:, None]), spread, tokens)
    real = at < total[:, None]
    maskable = real & (at >= np.where(request, start, 1)[:, None]) | blank
    ints = (x.astype(np.int32) for x in (task, prefix_len, start, stop))
    return TaskRows(tokens.astype(np.int32), maskable, real, *ints)
