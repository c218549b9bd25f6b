# SPDX-License-Identifier: Apache-2.0
"""What a client is sent of an answer does not depend on how much of it came at a time."""

import json
from types import SimpleNamespace

import httpx2
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.serve.answers import Choice
from geojax.serve.stream import event
from geojax.serve.ticket import View

LETTERS = "abc\ufffd"


def choice_of(stops):
    """Tokens are letters."""
    prompts = SimpleNamespace(decode=lambda ids: "".join(LETTERS[i] for i in ids))
    return Choice(0, 0, SimpleNamespace(view=View(), gone=False), prompts, stops)


def told(text, stops, ends):
    """What a reader is sent, where so many tokens are certain each time it looks."""
    choice, sent = choice_of(stops), ""
    ids = np.array([LETTERS.index(letter) for letter in text], np.int32)
    for end in (*sorted(ends), len(text)):
        last = end == len(text)
        choice.ticket.view = View(ids[:end], finish="length" if last else None)
        sent += choice.read()
        if choice.finish:
            break
    assert sent == choice.text
    return sent, choice.finish, choice.tokens


def test_one_stop_string_inside_another():
    for ends in ([], range(1, 8), [3], [4]):
        choice = choice_of(["bcd", "c"])
        choice.prompts = SimpleNamespace(decode=lambda ids: "".join(chr(97 + i) for i in ids))
        sent = ""
        for end in (*ends, 8):
            choice.ticket.view = View(np.arange(end), finish="length" if end == 8 else None)
            sent += choice.read()
        assert (sent, choice.finish, choice.tokens) == ("ab", "stop", 3)


@settings(max_examples=300, deadline=None)
@given(
    st.text(LETTERS, min_size=1, max_size=12),
    st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_an_answer_is_the_same_however_it_comes(text, stops, ends):
    whole = told(text, stops, [])
    assert told(text, stops, [end for end in ends if end <= len(text)]) == whole
    assert told(text, stops, range(len(text))) == whole
    # Of all stop strings the first one to be complete ends it; what may be half a character is not.
    seen = [text[:n].rstrip("\ufffd") for n in range(len(text))] + [text]
    first = next((n for n, part in enumerate(seen) if any(s in part for s in stops)), None)
    assert whole[1:] == (("length", len(text)) if first is None else ("stop", first))
    assert not any(s in whole[0] for s in stops)


def test_no_text_ends_an_events_line():
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\n\u00e9\U0001f600"
    sent = event({"text": text})
    found = list(httpx2.Response(200, content=sent).iter_lines())
    assert len([line for line in found if line]) == 1
    assert sent.isascii()
    assert json.loads(found[0][6:]) == {"text": text}
