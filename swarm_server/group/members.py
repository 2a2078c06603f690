"""The processes of a group: followers, here or on other machines, and the leader of those that a server starts here."""

from __future__ import annotations

import enum
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from swarm_models.out_of_memory import is_out_of_memory
from swarm_models.quantization import Packed
from swarm_protocol.errors import SwarmError
from swarm_protocol.failures import first_line, undone_on_error
from swarm_protocol.span import Span
from swarm_server.core.config import MOST_MEMBERS
from swarm_server.group.handshake import HandshakeFailed
from swarm_server.group.links import Deal, GroupEnded, LeaderLinks, LinkEnds, MemberLink, MemberRequest, OwnWeights
from swarm_server.group.payoff import measured_here
from swarm_server.group.split_weight import DISMISS, FORM, LOAD, SPEED, FollowerSplitter, LeaderSplitter, answer
from swarm_server.placement.slow_follower import SlowWindows

_logger = logging.getLogger(__name__)
_DIGEST_BYTES = 32
_REASON_BYTES = 4096  # at most, of why a follower has no place, or cannot load
_SIGN_S = 2.0  # between two signs of life of a follower that loads
_SILENT_S = 60.0  # without a sign of life from a follower that loads: it may be short of memory, or read a slow disk
_STUCK_S = 300.0  # without one more weight of a follower that loads: it may download a file of some gigabytes
_WINDOW_S = 5.0  # in which the times of products are added up
_ENDING_S = 5.0  # for a follower to end by itself, before it is killed

# Loads the blocks of a span, and calls the function with each module whose linear layers have just been packed.
LoadSpan = Callable[[Span, Callable[[torch.nn.Module], None]], Any]
MakeLoader = Callable[[], AbstractContextManager[LoadSpan]]  # called in the follower's process; must be picklable


class FollowerLeftOut(SwarmError):
    """The leader computes without this follower, because the group is faster without it."""


class Dismissal(enum.IntEnum):
    """An instruction to a follower that has no place in the group."""

    WAIT = 0  # until the leader has a place for it
    LEAVE = 1  # because the group is faster without it
    END = 2  # because it cannot compute with this leader


class LoadSign(enum.IntEnum):
    """The meaning of a message with a number that a follower sends while it loads a span."""

    LOADING = 0  # the number of weights that it holds so far
    LOADED = 1  # the digest of all its weights follows
    FAILED = 2  # the reason follows, of so many bytes

    def send(self, link: MemberLink, number: int = 0) -> None:
        """Send the message to the leader."""
        link.send(torch.tensor([self, number]))


class MemberWatch:
    """The watch of a leader over the followers of its group: whether one makes the group slow for long."""

    def __init__(self, links: LeaderLinks, clock: Callable[[], float] = time.monotonic) -> None:
        self._links, self._clock = links, clock
        self._windows, self._times_s, self._since = SlowWindows.none(links.members), links.times_s(), clock()

    def look(self) -> int | None:
        """Return the number of a follower without which the group would be faster, from 1 on; None if all are fast."""
        if self._clock() - self._since >= _WINDOW_S:
            times_s = self._links.times_s()
            window_s = [now - before for now, before in zip(times_s, self._times_s, strict=True)]
            self._windows = self._windows.after(self._links.deal.shares, window_s)
            self._times_s, self._since = times_s, self._clock()
        return self._windows.slow_follower


class LocalGroup:
    """The leader's side of a group whose followers are child processes on the same machine.

    Attributes:
        own_share: which part of each block's weights is in this machine's memory.
    """

    own_share = 1.0

    def __init__(self, make_loader: MakeLoader, members: int) -> None:
        """Start the followers; ``members`` counts the leader, too."""
        self.processes: list[BaseProcess] = []
        links: list[MemberLink] = []
        with undone_on_error(lambda: self._end(links)):
            for member in range(1, members):
                ends = LinkEnds.on_this_machine()
                self.processes.append(_started(make_loader, ends, member))
                links.append(MemberLink(ends.leader, ends.memory.fileno(), 0))
                ends.follower.close()
                ends.memory.close()
            self.links = formed_links(links, Deal.by_speed([1.0] * members))
        self._watch = MemberWatch(self.links)

    def find_failure(self) -> GroupEnded | None:
        """Return why the group has ended, or should end; None while it works."""
        for process in self.processes:
            if not process.is_alive():
                return GroupEnded(f"process {process.pid}, a member of the group, has ended")
        if (slow := self._watch.look()) is not None:
            return GroupEnded(f"process {self.processes[slow - 1].pid}, a member of the group, makes it slow")
        return self.links.failure

    def block_bytes_in(self, own_bytes: float) -> float:
        """Return how many bytes of whole blocks fit into ``own_bytes`` of this machine."""
        return own_bytes

    def close(self) -> None:
        """End the followers."""
        self._end(self.links.links)

    def _end(self, links: Sequence[MemberLink]) -> None:
        for link in links:
            link.close()
        for process in self.processes:
            process.join(_ENDING_S)
            if process.is_alive():
                process.kill()
                process.join()


def formed_links(links: Sequence[MemberLink], deal: Deal) -> LeaderLinks:
    """Send the followers their shares, and return the leader's links of the group. Raise GroupEnded if one is gone."""
    for member, link in enumerate(links, start=1):
        with link.blamed("join the group"):
            link.ask(MemberRequest(FORM, member, deal.members))
            link.send(deal.ends)
    return LeaderLinks(links, deal)


def dismiss(link: MemberLink, dismissal: Dismissal, reason: str) -> None:
    """Send a waiting follower the reason why it has no place, and what to do. It may have ended meanwhile."""
    text = _as_bytes(reason)
    with suppress(GroupEnded):
        link.ask(MemberRequest(DISMISS, len(text), dismissal))
        link.send(text)


def _as_bytes(reason: str) -> torch.Tensor:
    return torch.tensor(list(reason.encode()[:_REASON_BYTES]), dtype=torch.uint8)


def _received_reason(link: MemberLink, size_bytes: int) -> str:
    if not 0 < size_bytes <= _REASON_BYTES:
        raise GroupEnded(f"a member of the group sends a reason of {size_bytes} bytes")
    text = torch.empty(size_bytes, dtype=torch.uint8)
    link.receive(text)
    return bytes(text.tolist()).decode(errors="replace")


def load_together(links: LeaderLinks, span: Span, load: LoadSpan) -> Any:
    """Load the leader's rows of a span while the followers load theirs, and return what ``load`` returns.

    Raises:
        GroupEnded: a follower has ended, cannot load, shows no progress for minutes, or holds other weights.
        ValueError: no layer has rows for all members.
    """
    splitter = LeaderSplitter(links)
    threads = ThreadPoolExecutor(links.members)
    with links.exchange():
        for link in links.links:
            link.ask(MemberRequest(LOAD, span.start, span.end))
        digests = {threads.submit(_received_digest, link): link for link in links.links}
    threads.shutdown(wait=False)
    try:
        loaded = load(span, splitter.split_)
    except Exception:  # raised again
        with suppress(GroupEnded), links.exchange():  # followers may fail as the leader does, whose error says why
            for digest in digests:  # digests that stay on a link would be taken for those of the next span
                digest.result()
        raise
    _logger.info("waiting for the other members of the group to load blocks %s", span)
    with links.exchange():
        for digest in as_completed(digests):
            _check_digest(digest, splitter.digest(), digests[digest], span)
    if not splitter.num_weights:
        raise ValueError(
            f"no linear layer of blocks {span} has 64 rows for each of {links.members} members of the group: "
            "expected a larger model, or fewer members"
        )
    return loaded


def _check_digest(received: Future[bytes], expected: bytes, link: MemberLink, span: Span) -> None:
    """Raise GroupEnded if a follower has not loaded the leader's weights."""
    with link.blamed(f"load blocks {span}"):
        if received.result() != expected:
            dismiss(link, Dismissal.END, "this member has loaded other weights than the leader")
            raise GroupEnded("it has loaded other weights than the leader")
    link.loaded()


def _received_digest(link: MemberLink, clock: Callable[[], float] = time.monotonic) -> bytes:
    """Wait until the follower has loaded its rows, as long as it is alive and holds more and more weights.

    Raises:
        GroupEnded: the follower has ended, cannot load, gives no sign of life, or shows no progress.
    """
    link.limit(_SILENT_S)
    sign, held, since = torch.empty(2, dtype=torch.int64), -1, clock()
    while True:
        link.receive(sign)
        kind, number = sign.tolist()
        if kind == LoadSign.FAILED:
            raise GroupEnded(_received_reason(link, number))
        if kind == LoadSign.LOADED:
            break
        if number > held:
            held, since = number, clock()
        elif clock() - since > _STUCK_S:
            raise GroupEnded(f"it is alive, but has loaded nothing more for {_STUCK_S:g} seconds")
    digest = torch.empty(_DIGEST_BYTES, dtype=torch.uint8)
    link.receive(digest)
    link.limit()
    return bytes(digest.tolist())


def _started(make_loader: MakeLoader, ends: LinkEnds, member: int) -> BaseProcess:
    context = multiprocessing.get_context("spawn")
    arguments = make_loader, ends.follower, _Inherited(ends.memory.fileno())
    process = context.Process(target=_follow, args=arguments, name=f"group-{member}", daemon=True)
    process.start()
    return process


class _Inherited:
    """A file descriptor that a child process gets while it is started."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        from multiprocessing.reduction import DupFd  # there is none on Windows

        return _detached, (DupFd(self._descriptor),)


def _detached(duplicate: Any) -> int:
    descriptor: int = duplicate.detach()
    return descriptor


def _follow(make_loader: MakeLoader, connection: socket.socket, memory_file: int) -> None:
    """Hold rows of the leader's spans and multiply with them until the leader ends."""
    # Terminals send signals to all processes. A follower stays while the leader drains, and ends with its link.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    link = MemberLink(connection, memory_file, 1)
    os.close(memory_file)
    try:
        with make_loader() as load, suppress(FollowerLeftOut, HandshakeFailed):  # the leader has logged these
            follow(load, link)
    except (SwarmError, ValueError) as error:
        raise SystemExit(f"a member of the group on this machine cannot go on: {error}") from None


def follow(load: LoadSpan, link: MemberLink, say: Callable[[str], None] = lambda _place: None) -> None:
    """Answer the leader's requests until it closes the link; ``say`` is called with the place in each group.

    Raises:
        FollowerLeftOut: the group is faster without this member.
        HandshakeFailed: this member has loaded other weights than the leader.
    """
    own, place = OwnWeights(()), _Place(0, Deal.by_speed([1.0]))
    try:
        with torch.inference_mode():
            while True:
                request = link.follow(own)
                if request.wanted == FORM:
                    own, place = OwnWeights(()), _Place.received(request, link)
                    say(str(place))
                elif request.wanted == LOAD:
                    own = OwnWeights(())  # frees the weights of the last span
                    own = OwnWeights(_loaded(load, Span(request.rows, request.number), link, place))
                elif request.wanted == DISMISS:
                    _receive_dismissal(request, link)
                elif request.wanted == SPEED:
                    link.send(torch.tensor(measured_here(request.number), dtype=torch.float64))
                else:
                    answer(request, own, link)
    except GroupEnded as error:
        _logger.info("the group has ended: %s", error)


def _receive_dismissal(request: MemberRequest, link: MemberLink) -> None:
    """Log why this follower waits, or raise why it does not."""
    reason = _received_reason(link, request.rows)
    if request.number == Dismissal.WAIT:
        _logger.warning("the leader has no place for this follower, which waits: %s", reason)
        return
    raise (FollowerLeftOut if request.number == Dismissal.LEAVE else HandshakeFailed)(reason)


@dataclass(frozen=True)
class _Place:
    """The place of a follower in a group."""

    member: int
    deal: Deal

    @classmethod
    def received(cls, request: MemberRequest, link: MemberLink) -> _Place:
        if not 0 < request.rows < request.number <= MOST_MEMBERS:
            raise GroupEnded(f"the leader numbers this member {request.rows} of {request.number}")
        ends = torch.empty(request.number, dtype=torch.int32)
        link.receive(ends)
        return cls(request.rows, Deal(ends))

    def __str__(self) -> str:
        return f"member={self.member + 1} of={self.deal.members} rows={self.deal.shares[self.member]:.0%}"


def _loaded(load: LoadSpan, span: Span, link: MemberLink, place: _Place) -> list[Packed]:
    """Load this follower's rows of a span, and send the leader their digest, or the reason why it fails.

    Raises:
        ValueError: memory is too short; anything else that ``load`` raises is raised as well.
    """
    splitter = FollowerSplitter(place.member, place.deal)
    try:
        with _signs_of_life(link, splitter):
            load(span, splitter.split_)
    except Exception as error:  # raised again
        reason = _as_bytes(first_line(error))
        with suppress(GroupEnded):  # the leader may be gone
            LoadSign.FAILED.send(link, len(reason))
            link.send(reason)
        if is_out_of_memory(error):
            raise ValueError(f"no memory for this member's rows of blocks {span}: {first_line(error)}") from None
        raise
    LoadSign.LOADED.send(link)
    link.send(torch.tensor(list(splitter.digest()), dtype=torch.uint8))
    return splitter.weights


@contextmanager
def _signs_of_life(link: MemberLink, splitter: FollowerSplitter) -> Iterator[None]:
    """Send the leader the number of weights every few seconds, from a thread, until the context ends."""
    ended = threading.Event()

    def send() -> None:
        with suppress(GroupEnded):  # this follower notices it when it has loaded
            while not ended.wait(_SIGN_S):
                LoadSign.LOADING.send(link, splitter.num_weights)

    thread = threading.Thread(target=send, name="signs of life of a follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
