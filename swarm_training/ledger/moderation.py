"""The moderators' orders that a peer knows: which peers are banned, and to which step the run must go back."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from itertools import accumulate

from swarm_protocol.errors import AccessDenied
from swarm_training.ledger.orders import Ban, GoBack, ModeratorOrder, Orders

_MAX_REPLY_BYTES = 1 << 20
_FRESH_S = 1.0  # the time for which bans and due rollbacks are cached
_logger = logging.getLogger(__name__)


class Moderation:
    """The moderators' orders known to a peer. Peers relay orders, so that late joiners get them."""

    def __init__(self, orders: Orders | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep ``orders``, which is None in a run without an organiser: nobody may order anything there."""
        self._orders = orders
        self._clock = clock
        self._bans: dict[str, ModeratorOrder] = {}
        self._bans_until_s = 0.0  # cached until then, because checking signatures takes time
        self._due: dict[bytes, int] = {}
        self._due_for, self._due_until_s = -1, 0.0

    def digest(self) -> bytes:
        """Return the digest of all orders; empty if this peer obeys none."""
        if self._orders is None:
            return b""
        return sha256(b"".join(sorted(sha256(data).digest() for data in self._orders.signed()))).digest()

    def take(self, orders: Iterable[bytes]) -> None:
        """Accept the valid ones among these orders, which come from strangers."""
        if self._orders is None:
            return
        for data in orders:
            try:
                order = self._orders.take(data)
            except (ValueError, AccessDenied) as error:
                _logger.debug("ignored an order: %s", error)
                continue
            if order is not None and isinstance(order.action, Ban):
                self._bans_until_s = 0.0
                reason = order.action.reason or "no reason said"
                _logger.warning("a moderator has banned %s: %s", order.action.peer_id, reason)
            elif order is not None and isinstance(order.action, GoBack):
                self._due_until_s = 0.0

    def signed_unless(self, digest: bytes) -> list[bytes]:
        """Return all orders that fit into a reply, or none if ``digest`` is empty or equals ``self.digest()``.

        If not all fit, the reply has a random selection, so that a peer that asks again and again gets all orders.
        """
        if self._orders is None or not digest or digest == self.digest():
            return []
        orders = self._orders.signed()
        if sum(map(len, orders)) > _MAX_REPLY_BYTES:
            random.shuffle(orders)
        sizes = accumulate(map(len, orders))
        return [data for data, size in zip(orders, sizes, strict=True) if size <= _MAX_REPLY_BYTES]

    def banned(self) -> frozenset[str]:
        return frozenset(self.bans())

    def bans(self) -> dict[str, ModeratorOrder]:
        """Return the bans that are in force now, by peer id."""
        if self._orders is not None and self._clock() >= self._bans_until_s:
            self._bans = self._orders.bans()
            self._bans_until_s = self._clock() + _FRESH_S
        return self._bans

    def rollbacks_due(self, rollbacks: int) -> dict[bytes, int]:
        """Return the signed orders to go back that are in force after so many rollbacks, each with its step."""
        if self._orders is not None and (rollbacks != self._due_for or self._clock() >= self._due_until_s):
            self._due = self._orders.rollbacks_due(rollbacks)
            self._due_for, self._due_until_s = rollbacks, self._clock() + _FRESH_S
        return self._due

    def require_admitted(self, peer_id: str) -> None:
        """Raise AccessDenied if the peer is banned."""
        ban = self.bans().get(peer_id)
        if ban is not None and isinstance(ban.action, Ban):
            raise AccessDenied(
                f"a moderator has banned {peer_id} from the run: {ban.action.reason or 'no reason said'}"
            )
