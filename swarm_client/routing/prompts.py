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
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import PAGE_TOKENS

MAX_PAGED = 64 * PAGE_TOKENS  # positions of one prompt; few prompts differ only after so many
NUM_FEATURES = 16  # of a position; tokens whose embeddings begin with the same 16 numbers are equal in practice
_MAX_KEPT = 16384  # pages of all prompts, about 5 MB
_KEEP_S = 600.0  # servers evict pages that nobody has used for long
_ANSWER_TOKENS = 32  # an answer is assumed to have so many tokens, over which computing a prompt again is spread

ComputedPart = tuple[str, Span]  # a server's peer id, and the blocks that it computes in a chain


def pages_of(features: torch.Tensor, adapter: str) -> tuple[bytes, ...]:
    """Return a digest for each full page of a prompt; each digest stands for the page and all pages before it.

    Args:
        features: [positions, NUM_FEATURES], the beginnings of the first block's inputs, for ``MAX_PAGED`` positions.
        adapter: the name of the adapter that servers add to the blocks; empty if there is none.
    """
    digest, digests = hashlib.sha256(adapter.encode()), []
    for page in features.detach().to("cpu", torch.float32).split(PAGE_TOKENS):
        if len(page) == PAGE_TOKENS:
            digest.update(page.contiguous().numpy().data)
            digests.append(digest.digest()[:8])  # two prompts with equal digests would only get a worse chain
    return tuple(digests)


class SentPrompts:
    """The pages of recent prompts, with the parts of chains that have computed them."""

    def __init__(self) -> None:
        self._parts: OrderedDict[bytes, dict[ComputedPart, float]] = OrderedDict()  # by page, with the last time

    def add(self, parts: Iterable[ComputedPart], pages: Sequence[bytes], time_s: float) -> None:
        """Record that these parts of a chain get a prompt with these pages now."""
        sent = dict.fromkeys(parts, time_s)
        for page in pages:
            # ``pop`` moves the page to the end, so that the pages used least recently are dropped first.
            recent = {part: sent_s for part, sent_s in self._parts.pop(page, {}).items() if time_s - sent_s <= _KEEP_S}
            self._parts[page] = recent | sent
        while len(self._parts) > _MAX_KEPT:
            self._parts.popitem(last=False)

    def forget(self, peer_id: str) -> None:
        """Forget what the server has computed, because it has failed."""
        for parts in self._parts.values():
            for part in [part for part in parts if part[0] == peer_id]:
                del parts[part]

    def num_known(self, pages: Sequence[bytes], time_s: float) -> dict[ComputedPart, int]:
        """Return how many positions of a prompt each part of a chain probably still has."""
        known: dict[ComputedPart, int] = {}
        for number, page in enumerate(pages):
            for part, sent_s in self._parts.get(page, {}).items():
                has_pages_before = known.get(part, 0) == number * PAGE_TOKENS  # keys and values depend on them
                if time_s - sent_s <= _KEEP_S and has_pages_before:
                    known[part] = (number + 1) * PAGE_TOKENS
        return known


def with_prompts(costs: Costs, view: SwarmView, blocks: Span, num_known: Mapping[ComputedPart, int]) -> Costs:
    """Return the costs of a session over ``blocks`` whose prompt some servers know: others must compute more of it.

    A server keeps a prompt for exactly the blocks that it computed. The session is therefore assumed to use all of a
    server's blocks that lie in ``blocks``.
    """
    if not num_known:
        return costs
    known: dict[str, int] = {}
    for server in view.servers:
        start, end = max(server.span.start, blocks.start), min(server.span.end, blocks.end)
        if start < end:
            known[server.peer_id] = num_known.get((server.peer_id, Span(start, end)), 0)
    most = max(known.values(), default=0)
    repeated = {peer_id: (most - num) / _ANSWER_TOKENS for peer_id, num in known.items() if num < most}
    return replace(costs, repeated_tokens=repeated)
