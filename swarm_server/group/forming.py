"""The forming of groups by a leader: the first, and others when followers on other machines go or come."""

from __future__ import annotations

import asyncio
import logging
import math
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.backoff import Backoff
from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.records import GroupCandidate
from swarm_protocol.errors import SwarmError
from swarm_protocol.failures import logged_errors, undone_on_error
from swarm_protocol.process.invocation import typed
from swarm_server.core.config import ServerConfig
from swarm_server.group.links import Deal, GroupEnded, MemberLink
from swarm_server.group.members import Dismissal, dismiss, formed_links
from swarm_server.group.payoff import Payoff, measured
from swarm_server.group.remote import Lobby, RemoteGroup
from swarm_server.machine.memory import hosted_bytes
from swarm_server.placement.group_leader import chosen_leader

_logger = logging.getLogger(__name__)
_LOOK_S = 0.1
_ANNOUNCE_S = 5.0
_REJOIN_S = 5.0  # for the followers of a group that has ended to come back
# A slow follower is left out for so long, and a group that left out followers stays as it is for so long.
_BACK_S = 600.0
_BACKOFF = Backoff(first_s=30.0, most_s=3600.0)  # for the machine of a follower that has failed


class GroupRefused(SwarmError):
    """A group on several machines would be slower than its members without it."""


@dataclass(frozen=True)
class _LeftOut:
    """A follower, or all followers on one machine, that may not join the group before ``until_s``, and the reason.

    Attributes:
        failures: how often followers on the machine have failed, one time after the other.
    """

    until_s: float
    reason: str
    failures: int = 0

    def dismiss(self, link: MemberLink, now_s: float) -> None:
        """Send a follower that waits the reason why it has no place."""
        if self.until_s == inf:
            dismiss(link, Dismissal.LEAVE, self.reason)
            return
        minutes = math.ceil((self.until_s - now_s) / 60)
        dismiss(link, Dismissal.WAIT, f"{self.reason}; it may have a place again in {minutes} min")


class GroupLeader:
    """The leader of one group after the other: it keeps the lobby, and remembers which members it leaves out.

    Attributes:
        leads: whether this process should lead; false if another leads the named group.
    """

    def __init__(
        self, config: ServerConfig, lobby: Lobby, key: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Lead as ``config`` says, with followers that come to the ``lobby``. ``key`` is the group's secret.

        The leader of a group with a name leads once ``lead`` is called.
        """
        self._config, self._lobby, self._key, self._clock = config, lobby, key, clock
        self._group: RemoteGroup | None = None  # the last one
        self._tried: Sequence[MemberLink] = ()  # the followers of the last attempt to form a group
        self._left_out: dict[str, _LeftOut] = {}  # by names of followers, and by the machines of those that have failed
        self._notified: set[MemberLink] = set()  # waiting followers that were sent the reason why they are left out
        self._again_s = -inf  # the earliest time to end the group so that waiting followers can join it

        if config.group is None:
            self.lead()
        else:
            self.give_way()

    def lead(self) -> None:
        """Lead from now on: followers may come."""
        self.leads = True
        self._lobby.open()

    def give_way(self) -> None:
        """Dismiss the waiting followers and admit no others, because another process leads or may lead."""
        self.leads = False
        self._lobby.shut()

    def close(self) -> None:
        """Stop leading, and admit nobody any more."""
        self._lobby.close()

    def candidate(self) -> GroupCandidate:
        """Return this process as a candidate for the group."""
        return GroupCandidate(self._lobby.name, self._lobby.address, self.leads)

    async def keep_announced(self, dht: Dht, token: bytes) -> None:
        """Announce to the named group that this process leads it, until it gives way to another leader."""
        if self._config.group is None:
            return
        registry, own = dht.candidates(self._config.group, self._key, token), self.candidate()
        while self.leads:
            with logged_errors(_logger, "the leader of the group could not be announced"):
                await registry.publish(own)
                chosen = chosen_leader([own, *await registry.read()], self._config.group_size, waits=False)
                if chosen is not None and chosen.name != own.name:
                    self.give_way()
            await asyncio.sleep(_ANNOUNCE_S)

    def form(self, checkpoint: ModelCheckpoint, still_wanted: Callable[[], bool]) -> RemoteGroup:
        """Wait for followers, measure them, and form a group of those with which it is fastest.

        The first group waits for all followers, unless it has a name; others go on with those who come within seconds.

        Raises:
            GroupRefused: the first group would not pay, and has no name.
            GroupEnded: a follower has ended meanwhile, or the group is not wanted any more.
        """
        config = self._config
        if self._group is not None and self._group.slow:
            until_s = self._clock() + _BACK_S
            self._left_out[self._group.slow] = _LeftOut(until_s, "this follower has made the group slow for long")
        tried, self._tried = self._tried, ()
        self._learn_from(tried)
        links = self._tried = self._gathered(still_wanted)
        self._lobby.take(links)
        with undone_on_error(lambda: _close_all(links)):
            block_bytes = statistics.mean(hosted_bytes(checkpoint, config.quant))
            payoff = measured(links, config.quant, block_bytes, checkpoint.family.hidden_size)
            chosen = self._chosen(links, payoff)
            payoff = payoff.of(chosen)
            taken = formed_links([links[number] for number in chosen], Deal.by_speed(payoff.bytes_per_s))
        self._group = RemoteGroup(taken, payoff.free_bytes, config.group_always)
        return self._group

    def should_form_again(self) -> bool:
        """Return whether the group should end, so that a waiting follower joins or this leader follows another."""
        if not self.leads:
            return True
        if self._group is None or self._group.links.members >= self._config.group_size:
            return False
        return bool(self._eligible()) and self._clock() >= self._again_s

    def _chosen(self, links: Sequence[MemberLink], payoff: Payoff) -> Sequence[int]:
        """Return the numbers of the followers with which the group is fastest; all if the user forces it."""
        everybody = range(len(links))
        chosen = everybody if self._config.group_always else payoff.best_followers(len(links))
        if self._group is None and self._config.group is None:
            try:
                require_payoff(payoff.of(chosen or everybody), self._config.group_always)
            except GroupRefused as error:
                _dismiss_all(links, Dismissal.WAIT, str(error))  # for a leader that has --group-always
                raise
        left_out = [links[number] for number in set(everybody) - set(chosen)]
        if left_out:
            reason = f"the group with all members would reach only {payoff}"
            _logger.warning("%d of %d followers are left out: %s", len(left_out), len(links), reason)
            _dismiss_all(left_out, Dismissal.LEAVE, reason)
            _close_all(left_out)
            slower = _LeftOut(inf, "the group is faster without this follower")
            self._left_out |= dict.fromkeys((link.name for link in left_out), slower)
            self._again_s = self._clock() + _BACK_S
        return chosen

    def _learn_from(self, links: Sequence[MemberLink]) -> None:
        """Leave out machines whose followers have failed, longer each time, until a follower there has loaded."""
        failures = {link.host: link.failure for link in links if link.failure}
        for link in links:
            if link.has_loaded and link.host not in failures:
                self._left_out.pop(link.host, None)
        for host, failure in failures.items():
            count = 1 + (self._left_out[host].failures if host in self._left_out else 0)
            pause_s = _BACKOFF.after(count)
            self._left_out[host] = _LeftOut(self._clock() + pause_s, failure, count)
            _logger.warning("%s; followers on that machine may join again in %.0f s", failure, pause_s)

    def _eligible(self) -> list[MemberLink]:
        """Return the followers that may join the group. Send each other waiting follower the reason why it may not."""
        now_s, waiting, links = self._clock(), self._lobby.waiting(), []
        self._notified &= set(waiting)
        for link in waiting:
            left_out = [self._left_out[key] for key in (link.name, link.host) if key in self._left_out]
            longest = max(left_out, key=lambda each: each.until_s, default=None)
            if longest is None or longest.until_s <= now_s:
                links.append(link)
            elif link not in self._notified:
                self._notified.add(link)
                longest.dismiss(link, now_s)
        return links[: self._config.group_size - 1]

    def _gathered(self, still_wanted: Callable[[], bool]) -> list[MemberLink]:
        waits_for_all = self._group is None and self._config.group is None
        count, until = self._config.group_size - 1, self._clock() + (inf if waits_for_all else _REJOIN_S)
        if waits_for_all:
            words = count, self._config.group_key, _follower_command(self._config)
            _logger.info("waiting for %d on other machines, with a copy of %s: %s", *words)
        while len(links := self._eligible()) < count and self._clock() < until:
            if not still_wanted():
                raise GroupEnded("the server ends before all members of its group are there")
            time.sleep(_LOOK_S)
        return links


def _dismiss_all(links: Sequence[MemberLink], dismissal: Dismissal, reason: str) -> None:
    for link in links:
        dismiss(link, dismissal, reason)


def _close_all(links: Sequence[MemberLink]) -> None:
    for link in links:
        link.close()


def _follower_command(config: ServerConfig) -> str:
    words = ["--model", config.model, "--quant", config.quant, "--follow", str(config.group_listen)]
    words += ["--group-key", "FILE"]
    words += [] if config.model_revision is None else ["--revision", config.model_revision]
    words += [] if config.dtype == "auto" else ["--dtype", config.dtype]
    return f"{typed('server')} {shlex.join(words)}"


def require_payoff(payoff: Payoff, is_forced: bool) -> None:
    """Raise GroupRefused if the group does not pay, unless the user forces it."""
    if payoff.gain > 1 or is_forced:
        _logger.info("the group reaches %s", payoff)
        return
    raise GroupRefused(
        f"the group would reach only {payoff}: expected a faster network or members of a similar speed; "
        "--group-always forms it anyway"
    )
