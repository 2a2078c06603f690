"""What the fuzzer says to a server: calls beside open sessions, honest ones and ones that were changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from random import Random

import torch
from google.protobuf.message import DecodeError, Message

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.adapters import adapter_key
from swarm_protocol.wire.constants import MIB
from swarm_protocol.wire.session_keys import push_key_of
from tests.attack.fuzzing.honest_requests import HonestRequests, random_tensor
from tests.attack.fuzzing.mutations import mutated, mutated_bytes

_MAX_MESSAGE = 1 << 16  # of those that are repeated


class Ending(Enum):
    """What the fuzzer does after its last message."""

    FINISH = "ends its side of the stream, and reads to the end"
    LEAVE = "goes without a goodbye"
    SILENCE = "says nothing more: the server must end the stream"


@dataclass(frozen=True)
class Call:
    """One call, by its method."""

    method: str
    messages: tuple[Message | bytes, ...]
    ending: Ending = Ending.FINISH

    @property
    def data(self) -> list[bytes]:
        return [each if isinstance(each, bytes) else each.SerializeToString() for each in self.messages]


@dataclass(frozen=True)
class Conversation:
    """One thing to try.

    Attributes:
        kind: the call that it is about.
        sessions: that are open meanwhile, of honest messages.
        calls: made one after the other, or all ``at_once``.
        hidden: [1, tokens, hidden_size], if nothing was changed and the outputs for it are known.
    """

    kind: str
    calls: tuple[Call, ...]
    sessions: tuple[tuple[pb.SessionRequest, ...], ...] = ()
    at_once: bool = False
    hidden: torch.Tensor | None = None

    @property
    def num_messages(self) -> int:
        return sum(len(call.messages) for call in self.calls) + sum(map(len, self.sessions))


def conversation(honest: HonestRequests, chance: Random) -> Conversation:
    """About a call of any kind; one in five is honest."""
    kind = chance.choice((*_KINDS, "Session", "Session", "Push"))
    talk = _KINDS[kind](honest, chance)
    num_changes = chance.choice((0, 1, 1, 2, 4))
    for _ in range(num_changes):
        number = chance.randrange(len(talk.calls))
        call = talk.calls[number]
        call = replace(call, messages=_changed(call.messages, honest, chance))
        talk = replace(talk, calls=(*talk.calls[:number], call, *talk.calls[number + 1 :]), hidden=None)
    if num_changes and chance.random() < 0.2:
        talk = replace(talk, at_once=True)
    calls = tuple(replace(call, ending=_ending(call, chance)) for call in talk.calls)
    leaves = any(call.ending is not Ending.FINISH for call in calls)
    return replace(talk, calls=calls, hidden=None if leaves else talk.hidden)


def _ending(call: Call, chance: Random) -> Ending:
    waits = any(_waits_for_room(message) for message in call.data) if call.method == "Session" else False
    if waits or chance.random() < 0.1:  # it may wait for room as long as it has said
        return Ending.LEAVE
    ends_silence = call.method in ("Forward", "Backward", "PutAdapter", "Reroute")
    return Ending.SILENCE if ends_silence and chance.random() < 0.02 else Ending.FINISH


def _waits_for_room(message: bytes) -> bool:
    try:
        return bool(pb.SessionRequest.FromString(message).open.wait_s)
    except DecodeError:
        return False


# ------------------------------------------------------------ changes

Messages = tuple[Message | bytes, ...]


def _changed(messages: Messages, honest: HonestRequests, chance: Random) -> Messages:
    """One of the messages, or their order."""
    if not messages:
        return (chance.randbytes(9),)
    place = chance.randrange(len(messages))
    before, message, after = messages[:place], messages[place], messages[place + 1 :]
    choice = chance.random()
    if choice < 0.6 and isinstance(message, Message):
        return (*before, mutated(message, chance), *after)
    if choice < 0.8:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        return (*before, mutated_bytes(data, chance), *after)
    if choice < 0.85:
        return (*before, *after)
    if choice < 0.9:
        size = len(message) if isinstance(message, bytes) else message.ByteSize()
        return (*before, *[message] * (chance.choice((2, 30)) if size < _MAX_MESSAGE else 2), *after)
    if choice < 0.94:
        return tuple(chance.sample(messages, len(messages)))
    if choice < 0.99:
        other = _KINDS[chance.choice(tuple(_KINDS))](honest, chance).calls[-1].messages
        return (*before, chance.choice(other), message, *after)
    return (*before, b"\x1a" + chance.randbytes(chance.choice((MIB, 3 * MIB))), *after)


# ------------------------------------------------------------ honest calls of each kind


def _session(honest: HonestRequests, chance: Random) -> Conversation:
    requests = [honest.opening(chance.randbytes(16), chance)]
    hidden = random_tensor((1, chance.randint(2, 40), honest.hidden_size), chance)
    is_plain = chance.random() < 0.5
    start = number = 0
    while start < hidden.shape[1]:
        number += 1
        num_tokens = min(chance.choice((1, 2, 17)), hidden.shape[1] - start)
        if is_plain:
            step, parts = honest.plain_step(number, start, hidden[:, start : start + num_tokens]), []
        else:
            step, parts = honest.step(number, start, num_tokens, chance)
        requests += [pb.SessionRequest(step=step), *(pb.SessionRequest(more=part) for part in parts)]
        start += num_tokens
    if chance.random() < 0.5:
        requests.append(pb.SessionRequest(close=pb.Close()))
    return Conversation("Session", (Call("Session", tuple(requests)),), hidden=hidden if is_plain else None)


def _beside(honest: HonestRequests, chance: Random, key: bytes, next_hop: pb.NextHop | None = None) -> list[pb.Step]:
    """A session and its first steps."""
    opening = honest.opening(key, chance, next_hop)
    hidden = random_tensor((1, 3, honest.hidden_size), chance)
    return [opening, pb.SessionRequest(step=honest.plain_step(1, 0, hidden))]


def _push(honest: HonestRequests, chance: Random) -> Conversation:
    key, other = chance.randbytes(16), chance.randbytes(16)
    sessions = [tuple(_beside(honest, chance, key))]
    push_key = chance.choice((*[push_key_of(key)] * 6, key, other, push_key_of(other)))
    requests = [pb.PushRequest(push_key=push_key)]
    for number in range(chance.randint(1, 4)):
        step, parts = honest.step(2 + number, 3 + number, 1, chance)
        requests += [pb.PushRequest(step=step), *(pb.PushRequest(more=part) for part in parts)]
    if chance.random() < 0.2:  # the server itself pushes as well
        sessions.append(tuple(_beside(honest, chance, other, honest.hop(key))))
    return Conversation("Push", (Call("Push", tuple(requests)),), tuple(sessions))


def _steps(honest: HonestRequests, chance: Random) -> Conversation:
    """A bundle of steps, for sessions that are open, not, or somebody else's."""
    key, bundle_key = chance.randbytes(16), chance.randbytes(16)
    keys = [chance.choice((key, key, key, chance.randbytes(16))) for _ in range(chance.randint(1, 6))]
    entries = [
        pb.KeyedStep(session_key=each, step=honest.step(2 + number, 3 + number, 1, chance)[0])
        for number, each in enumerate(keys)
    ]
    sessions = [tuple(_beside(honest, chance, key))]
    bundles = [pb.StepBundle(key=bundle_key), pb.StepBundle(steps=entries)]
    return Conversation("Steps", (Call("Steps", tuple(bundles)),), tuple(sessions))


def _push_steps(honest: HonestRequests, chance: Random) -> Conversation:
    key = chance.randbytes(16)
    sessions = [tuple(_beside(honest, chance, key))]
    entries = [
        pb.PushedStep(
            push_key=chance.choice((push_key_of(key), push_key_of(key), key)),
            step=honest.step(2 + number, 3 + number, 1, chance)[0],
        )
        for number in range(chance.choice((1, 4, 9)))
    ]
    return Conversation("PushSteps", (Call("PushSteps", (pb.PushBundle(steps=entries),)),), tuple(sessions))


def _progress(honest: HonestRequests, chance: Random) -> Conversation:
    keys = [chance.randbytes(16) for _ in range(3)]
    sessions = (tuple(_beside(honest, chance, keys[0])), tuple(_beside(honest, chance, keys[1], honest.hop(keys[0]))))
    request = pb.ProgressRequest(session_key=chance.choice((*keys, push_key_of(keys[0]))), hold=chance.random() < 0.5)
    return Conversation("Progress", (Call("Progress", (request,)),), sessions)


def _reroute(honest: HonestRequests, chance: Random) -> Conversation:
    first, old, new = (chance.randbytes(16) for _ in range(3))
    nowhere = pb.NextHop(peer_id="nobody", push_key=push_key_of(old))
    sessions = (
        tuple(_beside(honest, chance, first, chance.choice((honest.hop(old), nowhere)))),
        (honest.opening(new, chance),),
        (honest.opening(old, chance),),
    )
    resent = honest.plain_step(1, 0, random_tensor((1, 3, honest.hidden_size), chance))
    resent.hidden.data = b""
    resent.hidden.dtype = chance.choice((pb.FLOAT32, pb.BFLOAT16, pb.INT64))
    requests = [pb.RerouteRequest(session_key=first, next=honest.hop(new), route=1)]
    for _ in range(chance.choice((0, 1, 1, 2))):
        requests.append(pb.RerouteRequest(resend=[resent] * chance.choice((1, 1, 3))))
    hold = Call("Progress", (pb.ProgressRequest(session_key=first, hold=True),))
    asked = Call("Progress", (pb.ProgressRequest(session_key=chance.choice((first, new))),))
    return Conversation("Reroute", (hold, Call("Reroute", tuple(requests)), asked), sessions)


def _copy(honest: HonestRequests, chance: Random) -> Conversation:
    key, to = chance.randbytes(16), chance.randbytes(16)
    sessions = (tuple(_beside(honest, chance, key)), (honest.opening(to, chance),))
    request = pb.CopyRequest(session_key=key, to=honest.hop(to))
    return Conversation("Copy", (Call("Copy", (request,)),), sessions)


def _put_adapter(honest: HonestRequests, chance: Random) -> Conversation:
    adapter = honest.adapter(chance)
    for _ in range(chance.choice((0, 0, 1, 2))):
        adapter = mutated(adapter, chance)
    data = adapter.SerializeToString(deterministic=True)
    if chance.random() < 0.2:
        data = mutated_bytes(data, chance)
    size = max(1, len(data) // chance.choice((1, 1, 2, 7)))
    parts = [pb.PutAdapterRequest(part=data[start : start + size]) for start in range(0, len(data), size)]
    forward, more = honest.forward(chance)
    forward.adapter.key = adapter_key(data)
    requests = (pb.ForwardRequest(forward=forward), *(pb.ForwardRequest(more=part) for part in more))
    return Conversation("PutAdapter", (Call("PutAdapter", tuple(parts)), Call("Forward", requests)))


def _forward(honest: HonestRequests, chance: Random) -> Conversation:
    message, parts = honest.forward(chance)
    if chance.random() < 0.1:
        message.adapter.name = "an adapter"
    requests = (pb.ForwardRequest(forward=message), *(pb.ForwardRequest(more=part) for part in parts))
    is_plain = not (parts or message.dropout_seed or message.HasField("adapter") or message.HasField("position_ids"))
    if not is_plain or message.HasField("attention_mask"):
        return Conversation("Forward", (Call("Forward", requests),))
    hidden = random_tensor((2, 7, honest.hidden_size), chance)
    message = pb.Forward(contract=honest.contract(), hidden=honest.plain_step(1, 0, hidden).hidden)
    plain = pb.ForwardRequest(forward=message)
    return Conversation("Forward", (Call("Forward", (plain,)),), hidden=hidden)


def _backward(honest: HonestRequests, chance: Random) -> Conversation:
    keep_key = chance.choice((b"", chance.randbytes(16), chance.randbytes(64)))
    message, parts = honest.forward(chance, keep_key)
    batch_size, num_tokens, _ = message.hidden.shape
    grad, more = honest.hidden(batch_size, num_tokens, chance)
    grads = (pb.BackwardRequest(grad=grad), *(pb.BackwardRequest(more=part) for part in more))
    if not keep_key:
        inputs = (pb.BackwardRequest(forward=message), *(pb.BackwardRequest(more=part) for part in parts))
        return Conversation("Backward", (Call("Backward", (*inputs, *grads)),))
    forward = (pb.ForwardRequest(forward=message), *(pb.ForwardRequest(more=part) for part in parts))
    kept = pb.BackwardRequest(kept=pb.KeptForward(contract=honest.contract(), key=keep_key))
    again = Call("Backward", (kept, *grads))
    return Conversation("Backward", (Call("Forward", forward), *[again] * chance.choice((1, 2))))


_REQUESTS: dict[str, Callable[[HonestRequests, Random], Message]] = {
    "Accuse": lambda honest, chance: honest.evidence(chance),
    "Doubt": lambda honest, chance: pb.DoubtRequest(
        peer_id=chance.choice((honest.record.peer_id, "another", "x" * chance.randrange(4096)))
    ),
    "Describe": lambda _honest, _chance: pb.DescribeRequest(),
    "Echo": lambda _honest, chance: pb.EchoRequest(
        payload=chance.randbytes(9), reply_bytes=chance.choice((0, 9, MIB, MIB + 1))
    ),
    "GetOffer": lambda _honest, _chance: pb.OfferRequest(),
    "GetPiece": lambda _honest, chance: pb.PieceRequest(sha256=chance.randbytes(32)),
}


def _one_request(kind: str, honest: HonestRequests, chance: Random) -> Conversation:
    return Conversation(kind, (Call(kind, (_REQUESTS[kind](honest, chance),)),))


_KINDS: dict[str, Callable[[HonestRequests, Random], Conversation]] = {
    "Session": _session,
    "Push": _push,
    "Steps": _steps,
    "PushSteps": _push_steps,
    "Progress": _progress,
    "Reroute": _reroute,
    "Copy": _copy,
    "PutAdapter": _put_adapter,
    "Forward": _forward,
    "Backward": _backward,
    **{kind: partial(_one_request, kind) for kind in _REQUESTS},
}
RPCS = tuple(_KINDS)
