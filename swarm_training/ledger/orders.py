"""The orders of moderators: bans and rollbacks. An order is signed, expires, and is carried out once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

from swarm_protocol.access.access_control import CLOCK_SKEW_S, AccessControl
from swarm_protocol.access.tokens import ID_BYTES, Role
from swarm_protocol.errors import AccessDenied
from swarm_protocol.net.identity import Identity
from swarm_protocol.wire.printable import printable
from swarm_training.ledger.signing import ContentKind, parsed, sign, signer_of
from swarm_training.pb import training_ledger_pb2 as pb

MAX_ORDER_BYTES = 4096
MAX_ORDERS = 4096  # the most orders that a peer keeps
_MAX_REASON_CHARS = 200
_MAX_STEP = 1 << 53


@dataclass(frozen=True)
class Ban:
    """A ban of a peer from the run."""

    peer_id: str
    reason: str


@dataclass(frozen=True)
class GoBack:
    """A rollback to the checkpoint of ``step``, for a run that has had ``rollbacks`` rollbacks before."""

    step: int
    rollbacks: int


@dataclass(frozen=True)
class ModeratorOrder:
    """An order with its Unix times in seconds. A ban lasts until the order expires. A wrong field raises ValueError."""

    run: str
    id: bytes
    issued_at: float
    expires_at: float
    action: Ban | GoBack

    def __post_init__(self) -> None:
        if len(self.id) != ID_BYTES:
            raise ValueError(f"an order's id has {len(self.id)} bytes: expected {ID_BYTES}")
        if not (isfinite(self.issued_at) and isfinite(self.expires_at) and self.issued_at < self.expires_at):
            raise ValueError(f"an order is valid from {self.issued_at} until {self.expires_at}: expected a later end")
        if isinstance(self.action, Ban):
            peer_id, reason = self.action.peer_id, self.action.reason
            if not (0 < len(peer_id) <= 64 and peer_id.isascii() and peer_id.isalnum()):
                raise ValueError(f"{printable(peer_id, 60)!r} is no peer id: expected one as `swarm train watch` shows")
            if len(reason) > _MAX_REASON_CHARS or not reason.isprintable():
                raise ValueError(f"the reason of a ban is {printable(reason, 40)!r}: expected up to 200 characters")
        elif not 0 <= self.action.step <= _MAX_STEP:
            raise ValueError(f"the step of a rollback is {self.action.step}: expected the step of a checkpoint")

    @classmethod
    def new(cls, run: str, action: Ban | GoBack, now: float, lasts_s: float) -> ModeratorOrder:
        return cls(run, secrets.token_bytes(ID_BYTES), now, now + lasts_s, action)

    def signed(self, moderator: Identity, token: bytes) -> bytes:
        message = pb.Order(run=self.run, id=self.id, issued_at=self.issued_at, expires_at=self.expires_at)
        if isinstance(self.action, Ban):
            message.ban.CopyFrom(pb.Ban(peer_id=self.action.peer_id, reason=self.action.reason))
        else:
            message.go_back.CopyFrom(pb.GoBack(step=self.action.step, rollbacks=self.action.rollbacks))
        return sign(ContentKind.ORDER, message, moderator, token).SerializeToString()

    @classmethod
    def parse(cls, signed: pb.SignedByPeer) -> ModeratorOrder:
        """Parse an order, without a check of its signature. Raise ValueError if it is no order."""
        message = parsed(pb.Order, signed.content, MAX_ORDER_BYTES)
        match message.WhichOneof("action"):
            case "ban":
                action: Ban | GoBack = Ban(message.ban.peer_id, message.ban.reason)
            case "go_back":
                action = GoBack(message.go_back.step, message.go_back.rollbacks)
            case _:
                raise ValueError("an order has no content: expected a ban or a rollback")
        return cls(message.run, message.id, message.issued_at, message.expires_at, action)


@dataclass(frozen=True)
class _Taken:
    """An order that was accepted. ``data``: the order as its moderator has signed it."""

    order: ModeratorOrder
    moderator: str
    token: bytes
    data: bytes


class Orders:
    """The registry of orders that a peer has received, for one run with an organiser."""

    def __init__(self, run: str, access: AccessControl, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._access = access
        self._clock = clock
        self._taken: dict[bytes, _Taken] = {}  # by id; an order that expires is dropped, and is refused from then on

    def take(self, data: bytes) -> ModeratorOrder | None:
        """Check an order and keep it. Return the order if it is new; None if it is known already. Raise ValueError if
        the data is no order, is of another run, has expired or not begun, or its signature is wrong; AccessDenied if
        the signer is no moderator."""
        signed = parsed(pb.SignedByPeer, data, MAX_ORDER_BYTES)
        order, now = ModeratorOrder.parse(signed), self._clock()
        if order.run != self._run:
            raise ValueError(f"the order is for run {printable(order.run, 60)!r}, and not for {self._run!r}")
        if now > order.expires_at or now < order.issued_at - CLOCK_SKEW_S:
            raise ValueError("the order has expired, or has not begun")
        moderator = signer_of(ContentKind.ORDER, signed)
        self._access.require(Role.MODERATOR, moderator, signed.token)
        self._forget(now)
        if order.id in self._taken:
            return None
        if len(self._taken) >= MAX_ORDERS:
            raise ValueError(f"there are {MAX_ORDERS} orders already: expected some to expire first")
        self._taken[order.id] = _Taken(order, moderator, signed.token, data)
        return order

    def bans(self) -> dict[str, ModeratorOrder]:
        """Return the bans in force now, by peer id. If a peer has several bans, return the one that lasts longest."""
        found: dict[str, ModeratorOrder] = {}
        for order in (taken.order for taken in self._in_force()):
            if isinstance(order.action, Ban):
                longest = found.get(order.action.peer_id)
                if longest is None or longest.expires_at < order.expires_at:
                    found[order.action.peer_id] = order
        return found

    def rollbacks_due(self, rollbacks: int) -> dict[bytes, int]:
        """Return the signed orders to go back for a run that has had so many rollbacks, each with its step."""
        return {
            taken.data: taken.order.action.step
            for taken in self._in_force()
            if isinstance(taken.order.action, GoBack) and taken.order.action.rollbacks == rollbacks
        }

    def signed(self) -> list[bytes]:
        """Return all known orders that have not expired, as signed, so that other peers can check them."""
        self._forget(self._clock())
        return [taken.data for taken in self._taken.values()]

    def _in_force(self) -> list[_Taken]:
        """Return the orders whose moderator was not revoked."""
        self._forget(self._clock())
        return [taken for taken in self._taken.values() if self._is_moderator(taken)]

    def _is_moderator(self, taken: _Taken) -> bool:
        try:
            self._access.require(Role.MODERATOR, taken.moderator, taken.token)
        except AccessDenied:
            return False
        return True

    def _forget(self, now: float) -> None:
        self._taken = {key: taken for key, taken in self._taken.items() if now <= taken.order.expires_at}
