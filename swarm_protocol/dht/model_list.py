"""Which models there are, as servers say: a list that each server may add one signed entry to, and few need to.

An entry is a server's record under a key of the list. The list has a few keys, two of which a model uses, so that it
can be read at once however many servers there are. Of a model's servers only those few write whose peer ids hash
lowest; but if some entry of the model contradicts, all do. So the list says what most of a model's servers say, as far
as there is room, and who would say otherwise needs more identities than the model has servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import sha256

from swarm_protocol.dht.records import ServerRecord, ServerState

NUM_SHARDS = 8
WRITERS = 8  # servers of a model
MAX_MODELS = 100  # those of most servers; each is looked at by who shows all
_SHARDS_PER_MODEL = 2


def shards_of(model: str) -> tuple[int, ...]:
    """The parts of the list in which a model stands."""
    start, apart = sha256(model.encode()).digest()[:2]
    first = start % NUM_SHARDS
    return tuple((first + number * (1 + apart % (NUM_SHARDS - 1))) % NUM_SHARDS for number in range(_SHARDS_PER_MODEL))


def should_write(own: ServerRecord, entries: Iterable[ServerRecord]) -> bool:
    """Whether a server needs to be on the list, beside the ``entries`` that others have there."""
    others = [entry for entry in entries if entry.model == own.model and entry.peer_id != own.peer_id]
    if any(entry.num_blocks != own.num_blocks for entry in others):
        return True
    return sum(_order(entry.peer_id) < _order(own.peer_id) for entry in others) < WRITERS


def models_of(entries: Iterable[ServerRecord]) -> dict[str, int]:
    """Names of models, sorted, with the number of blocks that most of their servers say; ``MAX_MODELS`` at most."""
    says = {entry.peer_id: entry for entry in entries if entry.state is not ServerState.OFFLINE}
    claims = Counter((entry.model, entry.num_blocks) for entry in says.values())
    models: dict[str, int] = {}
    for (model, num_blocks), _ in sorted(claims.items(), key=lambda claim: (-claim[1], claim[0])):
        if len(models) < MAX_MODELS:
            models.setdefault(model, num_blocks)
    return dict(sorted(models.items()))


def _order(peer_id: str) -> bytes:
    return sha256(peer_id.encode()).digest()
