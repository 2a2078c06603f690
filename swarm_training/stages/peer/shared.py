"""Parameters that two stages have, such as tied embeddings: both step with the sum of both stages' gradients.

A stage that holds its average offers its part for these parameters, by its digest. Once all stages hold theirs, each of
the two takes the other's part and adds it to its own. Both then apply the same bits, whichever peer they have asked,
and their parameters stay equal.

A sum of two means is that of one process bit for bit if the number of micro-batches is a power of two. Otherwise it may
differ in the last bit of a float64.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swarm_protocol.errors import SwarmError
from swarm_training.core.callbacks import InThread
from swarm_training.core.network import Network
from swarm_training.core.record import Progress
from swarm_training.meeting.attending import Averaged
from swarm_training.run.peer import TrainingPeer
from swarm_training.run.transfer.receiving import download_offer
from swarm_training.stages.peer.watch import RunWatch

_logger = logging.getLogger(__name__)
Spans = Sequence[tuple[int, int]]


def spans_of(names: Sequence[str], parameters: Sequence[Tensor], shared: Collection[str]) -> list[tuple[int, int]]:
    """Return where the shared parameters are in the vector of all, in order: (start, stop) of each."""
    spans, start = [], 0
    for name, parameter in zip(names, parameters, strict=True):
        stop = start + parameter.numel()
        spans += [(start, stop)] if name in shared else []
        start = stop
    return spans


@dataclass(eq=False, repr=False)
class SharedGradients:
    """A peer's exchange of shared parameters' gradients with another stage."""

    other: int  # the stage that has these parameters too, in the same order
    spans: Spans  # where they are in the average
    _peer: TrainingPeer
    _watch: RunWatch
    _network: Network
    _in_thread: InThread

    async def offer(self, averaged: Averaged) -> bytes:
        """Offer this stage's part, and return the digest by which other peers can ask for it."""
        digest: bytes = await self._in_thread(
            lambda: self._peer.offer.add(self._part(averaged.gradient).numpy().tobytes())
        )
        return digest

    async def completed(self, averaged: Averaged) -> Tensor | None:
        """Return the average, [n], with both stages' sum in it; None if no peer gives the other part at present."""
        length = sum(stop - start for start, stop in self.spans)
        step, size_bytes = averaged.group.step, length * averaged.gradient.element_size()
        holders = [peer for peer in self._watch.records(self.other) if _holds(peer, averaged)]
        digests = Counter(peer.shared.state_digest for peer in holders if peer.shared)
        for digest, _ in digests.most_common():
            for source in holders:
                if source.shared is None or source.shared.state_digest != digest:
                    continue
                try:
                    data = await download_offer(self._network, source, digest, size_bytes, self._in_thread)
                except (SwarmError, TimeoutError, ValueError) as error:
                    _logger.debug("%s does not give its part of step %d: %s", source.peer_id, step, error)
                    continue
                if len(data) == size_bytes:
                    summed: Tensor = await self._in_thread(partial(self._with_sum, averaged.gradient, data))
                    return summed
        return None

    def _with_sum(self, gradient: Tensor, data: bytes) -> Tensor:
        theirs = torch.frombuffer(bytearray(data), dtype=gradient.dtype)  # torch warns of memory that is read-only
        result, at = gradient.clone(), 0
        for start, stop in self.spans:
            result[start:stop] += theirs[at : at + stop - start]
            at += stop - start
        return result

    def _part(self, gradient: Tensor) -> Tensor:
        return torch.cat([gradient[start:stop] for start, stop in self.spans])


def _holds(peer: Progress, averaged: Averaged) -> bool:
    """Return whether the peer has its stage's part of that step, which it keeps for a while after the step."""
    group = averaged.group
    return peer.rollbacks == group.rollbacks and peer.shared is not None and peer.shared.step == group.step
