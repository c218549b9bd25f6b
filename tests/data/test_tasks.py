# SPDX-License-Identifier: Apache-2.0
"""Rows follow from their numbers, have the shares and lengths asked for, and the right answers."""

import math

import numpy as np
import pytest

from geojax.config import ConfigError
from geojax.data.tasks import (
    BEGIN,
    END,
    FUNCTION_IDS,
    GAP,
    KEY_IDS,
    KEYS,
    MASK,
    PAGE,
    PAGE_IDS,
    PAGES,
    PRIVATE,
    REACH,
    SHORTEST,
    STEPS,
    SYMBOLS,
    TASKS,
    THIS,
    VOCAB,
    Mixture,
    asked,
    exact_match,
    make_examples,
    make_rows,
)

NAMES = [task.name for task in TASKS]
SHARES = (0.5, 0.7, 0.9)


def rows(count=3000, first=0, seed=0, seq_len=80, **mixture):
    return make_rows(first + np.arange(count, dtype=np.uint64), seed, seq_len, Mixture(**mixture))


def take(these, index):
    return type(these)(*(field[index] for field in these))


def assert_same(a, b):
    for name, x, y in zip(a._fields, a, b, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


def assert_rate(hits, tries, rate, message=""):
    """Within 5 standard deviations of a binomial: wrong once in two million."""
    spread = math.sqrt(rate * (1 - rate) / tries)
    assert abs(hits / tries - rate) <= 5 * spread, f"{message}: {hits / tries}, not {rate}"


def read(tokens):
    """Answer of a request from its visible tokens, one symbol after the other."""
    ask = next(i for i, id in enumerate(tokens) if FUNCTION_IDS <= id < PAGE_IDS)
    function, page, *keys = tokens[ask : ask + PRIVATE]
    key = keys[keys.index(THIS) + 1]
    name, page, limit = NAMES[function - FUNCTION_IDS], page - PAGE_IDS + 1, 4 * (key - KEY_IDS) + 4
    answer = []
    if MASK in tokens:
        assert name == "fill"
        far = 1 + key - KEY_IDS
        tokens = [tokens[i - far] if id == MASK else id for i, id in enumerate(tokens)]
    first = ask - PAGE * page - REACH
    for row in range(first, first + PAGE):
        here, beside = tokens[row], tokens[row + 1]
        if name == "rank":
            answer.append(sum(other < here for other in tokens[first : first + PAGE]))
        elif name == "recall":
            earlier = [i for i in range(1, row) if tokens[i] == here]
            answer.append(tokens[earlier[-1] + 1] if earlier else here)
        elif name.startswith("hop"):
            for _ in range(int(name[3:])):
                row += 1 if tokens[row] < limit else 2
            answer.append(tokens[row])
        else:
            simple = {
                "key": key - KEY_IDS,
                "copy": here,
                "shift": beside,
                "max": max(here, beside),
                "fill": here,
            }
            answer.append(simple.get(name, (here + beside) % 16))
    return answer


def keys_of(these):
    """Of requests; what comes after THIS."""
    return these.tokens[np.arange(len(these.task)), (these.tokens == THIS).argmax(1) + 1] - KEY_IDS


def blanks(these):
    """Of requests that are not whole."""
    return these.maskable & (np.arange(80) < these.prefix_len[:, None])


def assert_right(these):
    """Told from what is seen where all blanks are hidden."""
    seen = np.where(blanks(these), MASK, these.tokens)
    for row in range(len(these.task)):
        start, stop = int(these.answer_start[row]), int(these.answer_stop[row])
        answer = read(seen[row, :start].tolist())[: stop - start]
        assert these.tokens[row, start:stop].tolist() == answer, these.tokens[row]


def test_answers_are_right():
    these = rows(whole=0.0)
    requests = take(these, these.task >= 0)
    assert set(requests.task.tolist()) == set(range(len(TASKS)))
    assert_right(requests)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("task", NAMES)
def test_examples_are_right_and_of_the_share_asked(task, share):
    these = make_examples(task, share, 100, 0, 80)
    assert_right(these)
    assert these.real.all()
    assert (these.task == NAMES.index(task)).all()
    assert (these.prefix_len == round(share * 80)).all()
    assert (these.answer_stop == np.minimum(these.answer_start + PAGE, 80)).all()
    canvas = np.arange(80) >= these.answer_start[:, None]
    np.testing.assert_array_equal(these.maskable & canvas, canvas)
    assert (these.maskable == canvas).all() == (task != "fill")


def test_examples_of_no_share_have_all_lengths_of_training_rows():
    these = make_examples("hop2", None, 2000, 0, 80)
    assert_right(these)
    assert (these.task == NAMES.index("hop2")).all()
    assert set(these.real.sum(1).tolist()) == set(range(40, 81))
    shares = these.prefix_len / these.real.sum(1)
    assert shares.min() < 0.5
    assert shares.max() > 0.9


def test_only_the_order_of_the_keys_says_which_counts():
    """As a bag, what stands in the private part is the same whatever the key."""
    these = make_examples("fill", 0.7, 2000, 0, 80)
    private = these.tokens[:, 56 + 2 : 56 + PRIVATE]
    expected = sorted([THIS, *range(KEY_IDS, KEY_IDS + KEYS)])
    np.testing.assert_array_equal(np.sort(private, 1), np.tile(expected, (2000, 1)))
    key, place = keys_of(these), (private == THIS).argmax(1)
    for number in range(KEYS):
        for at in range(KEYS):
            hits = ((key == number) & (place == at)).sum()
            assert_rate(hits, 2000, 1 / KEYS**2, f"key {number} at {at}")


def test_tasks_share_the_prefixes_of_their_examples():
    first = make_examples("copy", 0.7, 50, 3, 80).tokens[:, :56]
    for name in NAMES:
        tokens = make_examples(name, 0.7, 50, 3, 80).tokens[:, :56]
        same = tokens == first
        assert same.all() == (name != "fill")
        assert same.mean() > 0.75


def test_a_row_follows_from_its_number_alone():
    whole = rows(200, first=7)
    assert_same(take(whole, slice(50, 90)), rows(40, first=57))
    order = np.random.default_rng(0).permutation(200)
    mixed = make_rows(np.uint64(7) + order.astype(np.uint64), 0, 80)
    assert_same(take(whole, order), mixed)


def test_rows_of_other_numbers_seeds_and_examples_differ():
    starts = [
        x.tokens[:, 1:SHORTEST]
        for x in (
            rows(400),
            rows(400, first=400),
            rows(400, seed=1),
            make_examples("copy", 0.5, 400, 0, 80),
            make_examples("copy", 0.5, 400, 1, 80),
        )
    ]
    starts = np.concatenate(starts)
    assert len(np.unique(starts, axis=0)) == len(starts)


def test_layout():
    these = rows()
    at = np.arange(80)
    ends = these.real.sum(1)
    np.testing.assert_array_equal(these.real, at < ends[:, None])
    assert (these.tokens[~these.real] == END).all()
    assert (these.tokens[:, 0] == BEGIN).all()
    assert these.tokens.min() >= 0
    assert not (these.tokens == MASK).any()
    assert these.tokens.max() < VOCAB == MASK + 1

    prefix = (at > 0) & (at < these.prefix_len[:, None])
    assert (these.tokens[prefix] < SYMBOLS).all()
    fill = these.task == NAMES.index("fill")
    both = prefix[:, 1:] & prefix[:, :-1] & ~fill[:, None]
    steps = (np.diff(these.tokens) % SYMBOLS)[both]
    values, counts = np.unique(steps, return_counts=True)
    np.testing.assert_array_equal(values, STEPS)
    for count in counts:
        assert_rate(count, len(steps), 1 / len(STEPS))

    request = these.task >= 0
    document = take(these, ~request)
    for border in (document.prefix_len, document.answer_start, document.answer_stop):
        np.testing.assert_array_equal(border, ends[~request])
    asked = take(these, request)
    np.testing.assert_array_equal(asked.answer_start, asked.prefix_len + PRIVATE)
    np.testing.assert_array_equal(
        asked.answer_stop, np.minimum(asked.answer_start + PAGE, ends[request])
    )
    after = at >= asked.answer_stop[:, None]
    assert (asked.tokens[after] == END).all()


@pytest.mark.parametrize("seq_len", [52, 80, 128])
def test_lengths_pages_and_keys_spread_over_all_that_fit(seq_len):
    these = rows(6000, seq_len=seq_len, documents=0.0)
    ends = these.real.sum(1)
    assert (ends.min(), ends.max()) == (seq_len // 2, seq_len)
    assert these.prefix_len.min() == max(SHORTEST, round(0.45 * (seq_len // 2)))
    assert (these.answer_stop > these.answer_start).all()
    share = these.prefix_len / ends
    assert share.max() > 0.85
    assert share[ends == seq_len].min() < 0.5
    held = np.arange(len(ends)), these.prefix_len
    page = these.tokens[held[0], held[1] + 1] - PAGE_IDS + 1
    fit = np.minimum((these.prefix_len - 1 - REACH) // PAGE, PAGES)
    assert page.min() == 1
    assert (page <= fit).all()
    for most in np.unique(fit):
        of = page[fit == most]
        for number in range(1, most + 1):
            assert_rate((of == number).sum(), len(of), 1 / most, f"page {number} of {most}")
    key = keys_of(these)[held[0]]
    for number in range(KEYS):
        assert_rate((key == number).sum(), len(key), 1 / KEYS, f"key {number}")


def test_shares_of_the_mixture():
    weights = (3.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0)
    these = rows(8000, documents=0.3, whole=0.2, weights=weights)
    document = these.task < 0
    assert_rate(document.sum(), 8000, 0.3, "documents")
    seen = np.arange(80)[None] > 0
    everything = (these.maskable == (these.real & seen)).all(1)
    assert everything[document].all()
    assert_rate((everything & ~document).sum(), 8000, 0.2, "whole")
    canvas = these.real & (np.arange(80) >= these.answer_start[:, None])
    rest = ~everything
    np.testing.assert_array_equal((these.maskable & ~blanks(these))[rest], canvas[rest])
    asked = these.task[~document]
    for number, weight in enumerate(weights):
        assert_rate((asked == number).sum(), len(asked), weight / sum(weights), NAMES[number])


def test_blanks_are_of_requests_to_fill_alone_and_repeat_what_their_key_says():
    weights = (0.0,) * (len(TASKS) - 1) + (1.0,)
    these = rows(documents=0.0, whole=0.0, weights=weights)
    keys = keys_of(these)
    for row, (tokens, blank) in enumerate(zip(these.tokens, blanks(these), strict=True)):
        places, far = np.flatnonzero(blank), 1 + keys[row]
        assert GAP <= places[0] < 2 * GAP
        assert (np.diff(places) == GAP).all()
        assert these.prefix_len[row] - places[-1] <= GAP
        assert not blank[places - far].any()
        np.testing.assert_array_equal(tokens[places], tokens[places - far])
    others = rows(documents=0.0, whole=0.0, weights=(1.0,) * (len(TASKS) - 1) + (0.0,))
    assert not blanks(others).any()


def test_what_is_asked_hides_the_answer_and_blanks_and_tells_the_rest():
    for task in ("copy", "fill"):
        these = make_examples(task, 0.7, 20, 0, 80)
        tokens = asked(these)
        np.testing.assert_array_equal(tokens == MASK, these.maskable)
        np.testing.assert_array_equal(tokens[~these.maskable], these.tokens[~these.maskable])


def test_exact_match_wants_all_symbols_of_the_answer_and_nothing_else():
    these = make_examples("fill", 0.5, 5, 0, 80)
    decoded = these.tokens.copy()
    decoded[1, these.answer_start[1]] ^= 1
    decoded[2, these.answer_stop[2] - 1] ^= 1
    decoded[3, these.answer_stop[3]] = 0
    decoded[3, 1:4] = MASK
    decoded[4, np.flatnonzero(these.maskable[4])[2]] ^= 1
    assert exact_match(these, decoded).tolist() == [True, False, False, True, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_examples("swap", 0.5, 1, 0, 80), "no task 'swap'; use one of copy"),
        (lambda: make_examples("copy", 0.2, 1, 0, 80), r"prefix of 16 of 80 tokens.* 19\.\.73"),
        (lambda: make_examples("copy", 0.96, 1, 0, 80), "prefix of 77 of 80 tokens"),
        (lambda: rows(1, seq_len=51), "seq_len 51 is too short for the tasks; use 52"),
        (lambda: Mixture(documents=0.8, whole=0.3), r"documents 0\.8 and whole 0\.3"),
        (lambda: Mixture(documents=-0.1), r"documents -0\.1"),
        (lambda: Mixture(weights=(1.0,)), f"must be {len(TASKS)} numbers"),
        (lambda: Mixture(weights=(0.0,) * len(TASKS)), "one above 0"),
        (lambda: Mixture(weights=(-1.0,) + (1.0,) * (len(TASKS) - 1)), "none negative"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
