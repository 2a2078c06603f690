"""The streams that carry small steps of many sessions, and the replies to these steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

import grpc

from swarm_protocol.errors import PeerBusy, PeerError, RequestRejected, SessionLost
from swarm_protocol.failures import logged_errors
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.wire.bundling import Outbox, may_be_bundled
from swarm_protocol.wire.constants import MAX_BUNDLED, MAX_BUNDLED_BYTES, MIB
from swarm_server.net.arrivals import Arrivals
from swarm_server.net.incoming import Incoming
from swarm_server.net.validation import require_key
from swarm_server.rpc.step_group import BundledStep, StepGroup
from swarm_server.sessions.reading import StepReader
from swarm_server.sessions.sessions import HostedSession, Reply, Result, Send

C = TypeVar("C")
_MAX_UNDER_WAY = 4  # steps of one session at the same time
_MAX_TASKS = 512  # steps of one client on one stream at the same time
_MAX_STREAMS = 8  # streams of one client
_MOST_CLIENTS = 256  # the clients of a server that pushes, whose ``Arrivals`` are kept at hand
_MAX_UNREAD_BYTES = 4 * MIB  # replies that the other side has not read
_READ_S = 300.0  # for the other side to read so many bytes at the lowest rate of requests
_logger = logging.getLogger(__name__)


class ReplyBundle:
    """The replies to one client on the stream that its sessions share."""

    def __init__(self, client: Caller, outbox: Outbox[pb.KeyedReply]) -> None:
        self.client = client
        self.num_sessions = 0
        self.is_open = True
        self._outbox = outbox

    def close(self) -> None:
        self.is_open = False

    @contextmanager
    def joined(self, session_key: bytes, otherwise: Send) -> Iterator[Reply]:
        """Yield a session's way to reply: small outputs and failures go here, all else on its own stream."""

        async def reply(replies: list[pb.SessionReply]) -> None:
            is_put = False
            if _is_answer(replies) and may_be_bundled(replies[0]):
                is_put = self._put(pb.KeyedReply(session_key=session_key, reply=replies[0]).SerializeToString())
            if not is_put:
                await otherwise(replies)

        self.num_sessions += 1
        try:
            yield Reply(reply, self._put)
        finally:
            self.num_sessions -= 1

    def _put(self, entry: bytes) -> bool:
        """Put an encoded ``KeyedReply``. Return False if it is too large, or if the client does not read."""
        has_room = self.is_open and self._outbox.size_bytes < _MAX_UNREAD_BYTES
        if has_room and len(entry) <= MAX_BUNDLED_BYTES:
            self._outbox.put_encoded(entry)
            return True
        return False


def _is_answer(replies: Sequence[pb.SessionReply]) -> bool:
    """Return whether this is one failure or output. Outputs to relay stay in order on the session's own stream."""
    return len(replies) == 1 and (
        replies[0].HasField("failure") or (replies[0].HasField("output") and not replies[0].output.relay)
    )


class ReplyBundles:
    """The open reply bundles of all clients, by the keys that the clients chose."""

    def __init__(self) -> None:
        self._open: dict[bytes, ReplyBundle] = {}

    def find(self, key: bytes, client: Caller) -> ReplyBundle | None:
        """Return the client's bundle with this key, or None if it has none."""
        bundle = self._open.get(key)
        return bundle if bundle is not None and bundle.client.peer_id == client.peer_id else None

    @contextmanager
    def opened(self, key: bytes, client: Caller, outbox: Outbox[pb.KeyedReply]) -> Iterator[ReplyBundle]:
        """Open a bundle. Raise RequestRejected if the key is short or in use, PeerBusy if the client has too many."""
        require_key(key, "the key of a bundle")
        if sum(bundle.client.peer_id == client.peer_id for bundle in self._open.values()) >= _MAX_STREAMS:
            raise PeerBusy(f"a client has {_MAX_STREAMS} bundles open: expected that its sessions share one")
        if key in self._open:
            raise RequestRejected("a bundle with this key is open already")
        self._open[key] = bundle = ReplyBundle(client, outbox)
        try:
            yield bundle
        finally:
            bundle.close()
            del self._open[key]


class StepTasks:
    """The steps of one stream that are under way. A step that has to wait for something has a task of its own.

    The numbers of simultaneous steps are limited for each session and for each client.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._arrived: list[BundledStep] = []  # steps that ``begin`` begins
        self._following: list[BundledStep] = []  # such steps of sessions that have earlier steps under way
        self._under_way: dict[HostedSession, int] = {}
        self._of_client: dict[str, int] = {}
        self._without_task = 0
        self._idle = asyncio.Event()
        self._failing: set[asyncio.Task[None]] = set()  # the event loop itself keeps only weak references

    def add(
        self,
        hosted: HostedSession,
        step: pb.Step,
        size_bytes: int,
        arrivals: Arrivals,
        done: Callable[[bool], None],
    ) -> None:
        """Take a step, which ``begin`` begins. ``done`` is called at its end with False if it was refused, else True.

        If the step is refused, its client gets the reason. Raise RequestRejected, without a message to the client, if
        the step is too large or the client has too many steps under way.

        ``size_bytes``: of the step, which counts in ``arrivals`` until its end.
        """
        if size_bytes > MAX_BUNDLED_BYTES:
            raise RequestRejected(f"a step in a bundle is larger than {MAX_BUNDLED_BYTES} bytes")
        client = hosted.client.peer_id
        of_client, of_session = self._of_client.get(client, 0), self._under_way.get(hosted, 0)
        if of_client >= _MAX_TASKS:
            raise RequestRejected(f"a client has {_MAX_TASKS} steps under way on one stream")
        self._of_client[client], self._under_way[hosted] = of_client + 1, of_session + 1
        bundled = BundledStep(hosted, step, arrivals, size_bytes, done)
        (self._following if of_session else self._arrived).append(bundled)

    def begin(self) -> None:
        """Begin the steps that have been added, together if they need no tasks."""
        arrived, following, self._arrived, self._following = self._arrived, self._following, [], []
        group = StepGroup(self._ended)
        tasked: list[BundledStep] = []
        left: list[BundledStep] = []
        for arrivals, steps in _by_arrivals(arrived).items():
            try:
                arrivals.take(sum([step.size_bytes for step in steps]))
            except PeerBusy:  # tasks meet the same error, and send it to the clients
                tasked += steps
            else:
                left += [step for step in steps if not group.begin(step)]
        left += group.submit()
        _give_back(left)
        tasked += left
        self._without_task += len(arrived) - len(tasked)
        for step in chain(tasked, following):  # a session's steps keep their order
            self._tasks.create_task(self._compute(step))

    async def until_done(self) -> None:
        """Wait until no step is under way that has no task."""
        while self._without_task:
            self._idle.clear()
            await self._idle.wait()

    def _ended(self, steps: Sequence[BundledStep], result: Result) -> None:
        _give_back(steps)
        if isinstance(result, asyncio.CancelledError):  # the server ends
            self._count_out_without_task(steps)
        elif isinstance(result, BaseException):
            for step in steps:
                failing = asyncio.ensure_future(self._fail(step, result))
                self._failing.add(failing)
                failing.add_done_callback(self._failing.discard)
        else:
            self._count_out_without_task(steps)
            for step in steps:
                step.done(result)

    def _count_out_without_task(self, steps: Sequence[BundledStep]) -> None:
        self._without_task -= len(steps)
        if not self._without_task:
            self._idle.set()
        self._count_out(steps)

    def _count_out(self, steps: Sequence[BundledStep]) -> None:
        for step in steps:
            _count_down(self._under_way, step.hosted)
        for client, number in Counter([step.hosted.client.peer_id for step in steps]).items():
            _count_down(self._of_client, client, number)

    async def _fail(self, step: BundledStep, error: BaseException) -> None:
        could_be = False
        try:
            with logged_errors(_logger, "a client could not be told that its step failed"):
                could_be = await _report_failure(step.hosted, step.request, error)
        finally:
            self._count_out_without_task([step])
        step.done(could_be)

    async def _compute(self, step: BundledStep) -> None:
        try:
            could_be = await self._take(step.hosted, step.request, step.arrivals)
            step.done(could_be)
        finally:
            self._count_out([step])

    async def _take(self, hosted: HostedSession, step: pb.Step, arrivals: Arrivals) -> bool:
        try:
            with StepReader(hosted, arrivals) as reader:
                if self._under_way[hosted] > _MAX_UNDER_WAY:
                    raise RequestRejected(f"more than {_MAX_UNDER_WAY} steps of one session came at once")
                await reader.start(step)
                if reader.is_reading:
                    raise RequestRejected("a step in a bundle is incomplete")
            return True
        except Exception as error:  # the other sessions of the stream continue
            return await _report_failure(hosted, step, error)


def _by_arrivals(steps: Sequence[BundledStep]) -> dict[Arrivals, list[BundledStep]]:
    by_arrivals: dict[Arrivals, list[BundledStep]] = {}
    for step in steps:
        by_arrivals.setdefault(step.arrivals, []).append(step)
    return by_arrivals


def _give_back(steps: Sequence[BundledStep]) -> None:
    """Count the bytes of the steps as used no longer."""
    for arrivals, together in _by_arrivals(steps).items():
        arrivals.give_back(sum([step.size_bytes for step in together]))


async def _report_failure(hosted: HostedSession, step: pb.Step, error: BaseException) -> bool:
    """Report to the client why its step failed, and return False; True if the session's own stream has reported it."""
    if not isinstance(error, RequestRejected):
        if hosted.closed:
            return True
        _logger.error("a step failed", exc_info=error)
        error = PeerError("the server failed while it computed; its log says why")
    await hosted.refuse(step.number, error)
    return False


def _count_down(counts: dict[C, int], key: C, number: int = 1) -> None:
    if count := counts.pop(key) - number:
        counts[key] = count


async def serve(
    incoming: Incoming,
    outbox: Outbox[Any],
    take: Callable[[StepTasks, Any], None],
    *,
    admitted: Callable[[], object],
    idle_timeout_s: float,
    is_needed: Callable[[], bool] = lambda: False,
) -> None:
    """Take all messages until the stream ends, or is silent for ``idle_timeout_s`` and not needed.

    ``take``: adds the steps of a message. ``admitted`` raises AccessDenied once the caller is no longer a member.

    Raises:
        PeerBusy: the caller does not read the last replies. RequestRejected: a message has too many steps.
    """
    clock = asyncio.get_running_loop().time
    last_s = clock()

    async def take_messages(tasks: StepTasks) -> None:
        nonlocal last_s
        while (message := await incoming.begin(None)) is not None:
            last_s = clock()
            admitted()
            _take_all(message, tasks, outbox, take)

    sending = asyncio.ensure_future(_send_all(outbox))
    error: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = StepTasks(group)
            taking = asyncio.ensure_future(take_messages(tasks))
            try:
                await _until_silent(taking, lambda: clock() - last_s, idle_timeout_s, is_needed)
            finally:
                await end_tasks([taking])  # nobody reads the stream any more
            await tasks.until_done()
    except ExceptionGroup as errors:
        error = errors.exceptions[0]
    except asyncio.CancelledError:
        sending.cancel()
        raise
    outbox.close()
    try:
        async with asyncio.timeout(_READ_S):  # else a caller that reads nothing would keep its replies in memory
            await sending  # gRPC fails if a call ends in the middle of a message
    except TimeoutError:
        error = error or PeerBusy(f"the replies of this server were not read within {_READ_S:g} s")
    if error is not None:
        raise error


def _take_all(message: Any, tasks: StepTasks, outbox: Outbox[Any], take: Callable[[StepTasks, Any], None]) -> None:
    if len(message.steps) > MAX_BUNDLED:
        raise RequestRejected(f"{len(message.steps)} steps are in one message: expected at most {MAX_BUNDLED}")
    if outbox.size_bytes > _MAX_UNREAD_BYTES:
        raise RequestRejected("the replies of this server are not read")
    try:
        take(tasks, message)
    finally:
        tasks.begin()


async def _until_silent(
    taking: asyncio.Future[None], silent_s: Callable[[], float], idle_timeout_s: float, is_needed: Callable[[], bool]
) -> None:
    """Wait until all messages are taken, or none has come for a while; raise the error with which taking has ended."""
    left_s = idle_timeout_s
    while not (await asyncio.wait([taking], timeout=left_s))[0]:
        left_s = idle_timeout_s - silent_s()
        if left_s <= 0:
            if not is_needed():
                return
            left_s = idle_timeout_s
    taking.result()


async def _send_all(outbox: Outbox[Any]) -> None:
    with contextlib.suppress(grpc.aio.BaseError):  # the reader of the stream notices too
        await outbox.send_all()


def take_for(find: Callable[[bytes], HostedSession], arrivals: Arrivals) -> Callable[[StepTasks, pb.StepBundle], None]:
    """Return a function that takes a client's steps; ``find`` raises SessionLost if the client has no such session."""

    def take(tasks: StepTasks, message: pb.StepBundle) -> None:
        entries, message_bytes = message.steps, message.ByteSize()
        # Protobuf measures a message by encoding it. A small one is measured once, and its steps count for equal parts.
        part_bytes = message_bytes // max(1, len(entries)) if message_bytes <= MAX_BUNDLED_BYTES else None
        for entry in entries:
            try:
                hosted = find(entry.session_key)
            except SessionLost:  # the session's own stream has reported why
                continue
            step = entry.step
            size_bytes = step.ByteSize() if part_bytes is None else part_bytes
            tasks.add(hosted, step, size_bytes, arrivals, lambda _could_be: None)  # the client sees the step's output

    return take


def take_pushed(
    find: Callable[[bytes], HostedSession],
    arrivals: Arrivals,
    outbox: Outbox[pb.TakenStep],
) -> Callable[[StepTasks, pb.PushBundle], None]:
    """Return a function that takes the steps that another server pushes, and acknowledges each to that server."""
    arrivals_of = lru_cache(_MOST_CLIENTS)(arrivals.of)  # one for the steps of a client that come together

    def take_one(tasks: StepTasks, entry: pb.PushedStep) -> None:
        def tell(could_be: bool) -> None:
            if not (could_be and entry.step.settled):
                outbox.put(pb.TakenStep(push_key=entry.push_key, number=entry.step.number, lost=not could_be))

        try:
            hosted = find(entry.push_key)
            # The pushed step counts in the share of the session's client.
            tasks.add(hosted, entry.step, entry.step.ByteSize(), arrivals_of(hosted.client), tell)
        except (SessionLost, RequestRejected):  # the other entries continue
            tell(False)

    def take(tasks: StepTasks, message: pb.PushBundle) -> None:
        for entry in message.steps:
            take_one(tasks, entry)

    return take
