# SPDX-License-Identifier: Apache-2.0
"""What a slice holds of open rounds, and of what its messages left over."""

import json

import numpy as np
import pytest

from geojax.geomesh.slice_feedback import SliceFeedback
from geojax.geomesh.slice_work import OpenWork
from geojax.geomesh.sync import ErrorFeedback

FIRST, SECOND, THIRD = ((range(0, 8),), (range(8, 16),), (range(16, 24),))


class FakeWorker:
    """Says what is done to it; `sent` as a Worker's."""

    def __init__(self):
        self.sent, self.done = None, []

    def go_on(self):
        self.sent = "parameters as they were sent"
        self.done.append("go on")

    def go_back(self):
        self.done.append("go back")

    def end_round(self):
        self.sent = None
        self.done.append("end")


@pytest.fixture
def gone_on():
    """A slice that was given FIRST, has sent, and works at SECOND."""
    work, worker = OpenWork(), FakeWorker()
    assert not work.take(worker, 1, FIRST, SECOND)
    work.contribution, work.version = object(), "v"
    work.go_on(worker, 1)
    worker.done.clear()
    return work, worker


def test_what_is_ahead_becomes_the_round_once_its_message_was_merged(gone_on):
    work, worker = gone_on
    work.go_on(worker, 1)  # once only
    work.merged(worker, 1)
    assert (work.contribution, work.share, work.ahead) == (None, SECOND, ())
    assert not work.take(worker, 2, SECOND, THIRD)
    assert worker.done == []
    assert worker.sent


def test_a_round_that_is_opened_again_finds_its_message_sent(gone_on):
    work, worker = gone_on
    assert work.take(worker, 1, FIRST, SECOND)
    assert worker.done == []
    assert work.take(worker, 1, FIRST, THIRD)
    assert worker.done == ["go back"]  # to do THIRD instead
    assert not work.take(worker, 1, SECOND, THIRD)
    assert worker.done == ["go back", "end"]
    assert work.sent_round == 0


def test_a_round_that_ended_without_the_slice_leaves_nothing(gone_on):
    work, worker = gone_on
    work.accounts.behind_steps, work.accounts.behind_seconds = 3, 0.5
    work.drop(worker)
    assert worker.done == ["end"]
    assert (work.contribution, work.share, work.ahead, work.sent_round) == (None, (), (), 0)
    work.merged(worker, 1)  # with another process's message
    assert worker.done == ["end", "end"]


def test_facts_survive_json(gone_on):
    work, _ = gone_on
    work.accounts.behind_steps, work.accounts.behind_seconds = 3, 0.5
    other = OpenWork()
    other.restore(json.loads(json.dumps(work.facts())))
    assert other.facts() == work.facts()
    assert (other.share, other.ahead, other.sent_round) == (FIRST, SECOND, 1)


def test_feedback_changes_by_messages_that_were_merged_alone():
    feedback = SliceFeedback(ErrorFeedback([np.ones(3, np.float32)], None))
    message = feedback.for_message()
    message.own[0] += 1
    assert feedback.value.own[0].tolist() == [1, 1, 1]
    feedback.merged(4, message)
    assert (feedback.round, feedback.value.own[0].tolist()) == (4, [2, 2, 2])
    feedback.forget(6)  # another process sent messages up to there
    assert (feedback.round, feedback.value.own[0].tolist()) == (6, [0, 0, 0])
    assert message.own[0].tolist() == [2, 2, 2]
    assert SliceFeedback(None).for_message() is None
