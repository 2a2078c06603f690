"""The prompts that a client has sent to servers, so that a prompt that begins alike goes to the same servers. Pure.

Servers keep the keys and values of recent prompts, see "Shared prefixes" in ``docs/how-to/many-users.md``.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from swarm_client.routing.routing import Costs
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.wire.constants import PAGE_TOKENS

MAX_PAGED = 64 * PAGE_TOKENS  # positions of one prompt; few prompts differ only after so many
_MAX_KEPT = 16384  # pages of all prompts, about 2 MB
_KEEP_S = 600.0  # servers evict pages that nobody has used for long
_NUM_FEATURES = 16  # of a position; tokens whose embeddings begin with the same 16 numbers are equal in practice
# The time to compute a page again counts once in so many tokens of the answer, beside their own time.
_ANSWER_TOKENS = 32


def pages_of(hidden: torch.Tensor) -> tuple[bytes, ...]:
    """Return a digest for each full page of a prompt; each digest stands for the page and all pages before it.

    hidden: [positions, hidden_size], the inputs of the first block.
    """
    pages = hidden[:MAX_PAGED, :_NUM_FEATURES].detach().to(torch.float32).cpu().split(PAGE_TOKENS)
    digest, digests = hashlib.sha256(), []
    for page in pages:
        if len(page) == PAGE_TOKENS:
            digest.update(page.contiguous().numpy().data)
            digests.append(digest.digest()[:8])
    return tuple(digests)


class SentPrompts:
    """The pages of recent prompts, with the servers that have computed them."""

    def __init__(self) -> None:
        self._servers: OrderedDict[bytes, dict[str, float]] = OrderedDict()  # by page: peer ids, and when it was sent

    def add(self, peer_ids: Iterable[str], pages: Sequence[bytes], time_s: float) -> None:
        """Record that the servers get a prompt with these pages now."""
        sent = dict.fromkeys(peer_ids, time_s)
        for page in pages:
            self._servers.setdefault(page, {}).update(sent)
            self._servers.move_to_end(page)
        while len(self._servers) > _MAX_KEPT:
            self._servers.popitem(last=False)

    def num_known(self, pages: Sequence[bytes], time_s: float) -> dict[str, int]:
        """Return how many positions of a prompt each server probably still has, by peer id."""
        known: dict[str, int] = {}
        for number, page in enumerate(pages):
            for peer_id, sent_s in self._servers.get(page, {}).items():
                if time_s - sent_s <= _KEEP_S and known.get(peer_id, 0) == number * PAGE_TOKENS:
                    known[peer_id] = (number + 1) * PAGE_TOKENS
        return known


def with_prompts(costs: Costs, view: SwarmView, num_known: Mapping[str, int]) -> Costs:
    """Return the costs of a session whose prompt some servers know: every other server must compute more of it."""
    most = max((num_known.get(server.peer_id, 0) for server in view.servers), default=0)
    repeated = {server.peer_id: (most - num_known.get(server.peer_id, 0)) / _ANSWER_TOKENS for server in view.servers}
    return replace(costs, repeated_tokens={peer_id: num for peer_id, num in repeated.items() if num})
