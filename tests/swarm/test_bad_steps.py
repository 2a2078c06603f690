"""Sessions and steps no honest client sends: a refused step leaves its session as it was, and the server lives on."""

from __future__ import annotations

import pytest
import torch

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import decode
from tests.swarm.target import (
    BAD_INPUTS,
    CLOSE,
    FULL,
    INVALID,
    LAST_ROOM,
    MORE,
    ROOM,
    TOKENS,
    UNKNOWN,
    assert_close,
    assert_one_sentence,
    assert_refused,
    assert_session_works,
    assert_step_refused,
    filled,
    header,
    wire,
)
from tests.zoo import HIDDEN, POSITIONS

pytestmark = pytest.mark.promise(
    "a step that is wrong is refused in one sentence, and the session or the server goes on"
)


def test_step_before_open(target):
    for request in (target.step(), MORE, CLOSE, pb.SessionRequest()):
        answer = target.client.session(request)
        assert_refused(answer, UNKNOWN, "does not know the session")


NEXT = pb.NextHop(peer_id="next", push_key=bytes(16))


BAD_OPENINGS = {
    "no-rows": ({"batch_size": 0}, INVALID, "batch size 0 is out of range"),
    "too-many-rows": ({"batch_size": 2**32 - 1}, INVALID, "batch size 4294967295 is out of range"),
    "no-key": ({"session_key": b""}, INVALID, "the session key has 0 bytes: expected 16"),
    "short-key": ({"session_key": bytes(15)}, INVALID, "the session key has 15 bytes: expected 16"),
    "no-room-with-outputs": (
        {"reserve_tokens": ROOM + 1, "next": NEXT},
        FULL,
        f"no room for {ROOM + 1} tokens .* has {ROOM} in all",
    ),
    "no-room": ({"reserve_tokens": LAST_ROOM + 1}, FULL, f"no room for {ROOM + 1} tokens .* has {ROOM} in all"),
    "no-room-for-all-rows": (
        {"reserve_tokens": 26, "batch_size": 2},
        FULL,
        f"no room for 42 tokens .* has {ROOM} in all",
    ),
    "longer-than-the-model": (
        {"reserve_tokens": POSITIONS + 1},
        INVALID,
        f"257 positions are more than the model's {POSITIONS}",
    ),
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
def test_open(target, name):
    fields, status, sentence = BAD_OPENINGS[name]
    answer = target.client.session(target.open(**fields))
    assert_refused(answer, status, sentence)


def test_two_sessions_with_one_key(target):
    opening = target.open()
    with target.client.open_session(opening):
        answer = target.client.session(opening)
        assert_refused(answer, INVALID, "a session with this key is open already")


def test_no_room_beside_another_session(target):
    """The first session holds 24 of 40 tokens; the 16 that are left are for whoever asks for no more."""
    first = target.talk(target.open(reserve_tokens=24, next=NEXT), CLOSE)
    assert first.replies[0].opened.tokens_left == ROOM - 24
    with target.client.open_session(target.open(reserve_tokens=24, next=NEXT)):
        answer = target.client.session(target.open(reserve_tokens=17, next=NEXT))
        assert_refused(answer, FULL, f"no room for 17 more tokens .* 16 of {ROOM} are left")
        assert_session_works(target.talk(target.open(reserve_tokens=20), target.step(), CLOSE), target, 1)


def test_a_session_that_outgrows_the_room(target):
    long = torch.zeros(1, LAST_ROOM - TOKENS + 1, HIDDEN)
    answer = target.talk(target.open(), target.step(), target.step(TOKENS, long), CLOSE)
    assert_step_refused(answer, 2, FULL, f"no room for 36 more tokens .* 35 of {ROOM} are left")
    assert_session_works(answer, target, 1)


@pytest.mark.parametrize("start", [TOKENS + 1, TOKENS + 20])
def test_step_behind_a_gap(target, start):
    last = target.hidden[:, :1]
    steps = target.step(), target.step(start, last), target.step(TOKENS, last)
    answer = target.talk(target.open(reserve_tokens=TOKENS + 1), *steps, CLOSE)
    assert_step_refused(answer, 2, INVALID, f"begins at position {start}, but the session has {TOKENS}")
    assert answer.replies[3].WhichOneof("kind") == "output"
    assert_session_works(answer, target, 1)


@pytest.mark.parametrize("start", [0, 1, TOKENS - 1])
def test_step_that_begins_before_the_end_takes_the_place_of_what_was_there(target, start):
    other = torch.ones(1, TOKENS, HIDDEN)
    steps = target.step(hidden=other), target.step(), target.step(start, target.hidden[:, start:])
    answer = target.talk(target.open(), *steps, CLOSE)
    assert torch.equal(decode(answer.replies[2].output.hidden), target.expected)
    assert_close(decode(answer.replies[3].output.hidden), target.expected[:, start:])


def test_step_longer_than_a_chunk(target):
    """Longer ones would hold up others; the session learns of it at its start."""
    (opened,) = target.talk(target.open(), CLOSE).replies
    longest = opened.opened.max_step_tokens
    answer = target.talk(target.open(), target.step(hidden=header(1, longest + 1, HIDDEN)), target.step(), CLOSE)
    assert_step_refused(answer, 1, INVALID, f"1 × {longest + 1} positions is too long: expected at most {longest}")
    assert_session_works(answer, target, 2)


def test_a_number_that_was_there_is_passed_over(target):
    other = torch.ones(1, TOKENS, HIDDEN)
    steps = [target.step(hidden=other, number=number) for number in (3, 3, 2, 1)]
    answer = target.talk(target.open(), target.step(number=3), *steps, target.step(number=4), CLOSE)
    assert [reply.output.number for reply in answer.replies[1:]] == [3, 4]
    assert_session_works(answer, target, 1)
    assert_session_works(answer, target, 2)


def test_the_number_of_a_refused_step_may_be_used_again(target):
    bad = target.step(hidden=wire(filled(float("nan"))), number=1)
    answer = target.talk(target.open(), bad, target.step(number=1), CLOSE)
    assert answer.replies[1].failure.number == 1
    assert_session_works(answer, target, 2)


def test_only_the_outputs_that_are_wanted(target):
    for num_wanted in (0, 1, TOKENS):
        answer = target.talk(target.open(), target.step(outputs_wanted=num_wanted), CLOSE)
        output = answer.replies[1].output
        assert (output.number, output.HasField("hidden"), len(answer.replies)) == (1, num_wanted > 0, 2)
        if num_wanted:
            assert torch.equal(decode(output.hidden), target.expected[:, -num_wanted:])


BAD_STEPS = {
    "reorder-out-of-range": (
        {"changes": [pb.Change(reorder=pb.Reorder(indices=[0, 1]))]},
        "takes row 1 of a session that has 1 rows",
    ),
    "reorder-to-nothing": ({"changes": [pb.Change(reorder=pb.Reorder())]}, "batch size 0 is out of range"),
    "reorder-to-too-many": (
        {"changes": [pb.Change(reorder=pb.Reorder(indices=[0] * 5000))]},
        "batch size 5000 is out of range: expected 1 to 4096",
    ),
    "reorder-to-another-batch": (
        {"changes": [pb.Change(reorder=pb.Reorder(indices=[0, 0]))]},
        "hidden states of 1 rows came for a session of 2 rows",
    ),
    "crop-to-more": ({"changes": [pb.Change(crop=pb.Crop(length=TOKENS + 1))]}, f"position 7.* has {TOKENS}"),
    "crop-below-the-start": ({"changes": [pb.Change(crop=pb.Crop(length=3))]}, f"begins at position {TOKENS}.* has 3"),
    "no-change": ({"changes": [pb.Change()]}, "a change of unknown kind"),
    "a-good-change-before-a-bad-one": (
        {"changes": [pb.Change(crop=pb.Crop(length=1)), pb.Change()]},
        "a change of unknown kind",
    ),
    "rows": ({"hidden": torch.zeros(2, 1, HIDDEN)}, "hidden states of 2 rows came for a session of 1 rows"),
    "too-many-outputs": ({"outputs_wanted": 2}, "2 outputs are wanted of a step of 1 positions"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_step_that_does_not_fit_the_session(target, name):
    """The session is as it was before: what follows is computed as if the step had not been."""
    fields, sentence = BAD_STEPS[name]
    bad = target.step(**{"start": TOKENS, "hidden": target.hidden[:, :1], **fields})
    steps = target.step(), bad, target.step(4, target.hidden[:, 4:])
    answer = target.talk(target.open(), *steps, CLOSE)
    assert_session_works(answer, target, 1)
    assert_step_refused(answer, 2, INVALID, sentence)
    assert_close(decode(answer.replies[3].output.hidden), target.expected[:, 4:])


NO_SESSION_LEFT = {
    "open-twice": (lambda target: [target.open()], "open already"),
    "nothing": (lambda target: [pb.SessionRequest()], "unknown kind"),
    "part-without-beginning": (lambda target: [MORE], "without its beginning"),
    "step-inside-a-step": (
        lambda target: [target.step(6, header(1, 1, HIDDEN)), target.step(6)],
        "before all parts of the one before it",
    ),
    "more-parts-than-announced": (
        lambda target: [target.step(6, header(1, 1, HIDDEN)), pb.SessionRequest(more=bytes(257))],
        "more than the announced 256 bytes",
    ),
}


@pytest.mark.parametrize("name", NO_SESSION_LEFT)
def test_requests_that_end_a_session(target, name):
    """There is no telling what the client believes the session to be after these."""
    requests, sentence = NO_SESSION_LEFT[name]
    answer = target.talk(target.open(), target.step(), *requests(target))
    assert torch.equal(decode(answer.replies[1].output.hidden), target.expected)
    assert (len(answer.replies), answer.status) == (2, INVALID)
    assert_one_sentence(answer.details, sentence)


def test_parts_of_a_refused_step_are_passed_over(target):
    too_long = target.step(hidden=header(1, POSITIONS + 1, HIDDEN))
    answer = target.talk(target.open(), too_long, MORE, MORE, target.step(), CLOSE)
    assert_step_refused(answer, 1, INVALID, "257 positions are more")
    assert_session_works(answer, target, 2)


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_hidden_states_masks_and_positions_of_a_step(target, name):
    """The session is as it was before, and goes on."""
    fields, sentence = BAD_INPUTS[name]
    sentence = "positions are more than the model's" if name == "huge" else sentence
    answer = target.talk(target.open(), target.step(**fields), target.step(), CLOSE)
    assert_step_refused(answer, 1, INVALID, sentence)
    assert_session_works(answer, target, 2)
