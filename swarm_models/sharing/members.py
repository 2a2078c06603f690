"""The members that offer a model's files, and the requests to them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from math import inf

from swarm_models.sharing.download import OfferingMember
from swarm_models.sharing.manifest import MAX_MANIFEST_BYTES, HeldPieces, Manifest, agreed
from swarm_protocol.dht.claims import within_addresses
from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.errors import BadReply, CheckpointError, SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.rpc.channels import translated
from swarm_protocol.rpc.stubs import ServiceStub

_MAX_ASKED = 16
MAX_PER_ADDRESS = 2  # an attacker needs many addresses to decide what the majority says
_OFFER_S = 30.0
_MAX_AGE_S = 10.0  # maximum age of the known offers
_logger = logging.getLogger(__name__)


class OfferingMembers:
    """The members that offer files of one revision of a model, according to the DHT and the members themselves."""

    def __init__(
        self,
        revision: str,
        view: Callable[[], Awaitable[SwarmView]],
        stub: Callable[[ServerRecord], Awaitable[ServiceStub]],
    ) -> None:
        """Set how to read the ``view`` of the model's servers, and how to connect a ``stub`` to one."""
        self._revision = revision
        self._view, self._stub = view, stub
        self._known: list[OfferingMember] = []
        self._known_s = -inf
        self._manifests: dict[bytes, Manifest] = {}  # by digest: most members offer the same one
        self._parsing = asyncio.Lock()  # one offer at a time: the next one finds the same manifest parsed

    async def find(self) -> list[OfferingMember]:
        """Ask some of the members for their offers, or return the known offers if they are recent."""
        clock = asyncio.get_running_loop().time
        if clock() - self._known_s > _MAX_AGE_S or not self._known:
            try:
                async with asyncio.timeout(_OFFER_S):
                    view = await self._view()
            except (SwarmError, TimeoutError, OSError) as error:
                _logger.info("the DHT cannot be read: %r", error)
                return self._known
            offering = [server for server in view.servers if self._offers(server)]
            counted = within_addresses(offering, most=MAX_PER_ADDRESS)
            asked = random.sample(counted, min(len(counted), _MAX_ASKED))
            offers = await asyncio.gather(*map(self._ask, asked))
            self._known, self._known_s = [offer for offer in offers if offer is not None], clock()
            self._manifests = {member.offer.manifest.digest: member.offer.manifest for member in self._known}
        return self._known

    async def manifest(self, wanted: bytes | None) -> Manifest | None:
        """Return the manifest with the digest ``wanted``, or the one most members agree on; None if there is no offer.

        Raises:
            CheckpointError: members offer other manifests, but not the wanted one.
        """
        manifests = [member.offer.manifest for member in await self.find()]
        if not manifests:
            return None
        if wanted is None:
            return agreed(manifests)
        for manifest in (*manifests, agreed(manifests)):
            if manifest.digest == wanted:
                return manifest
        offered = ", ".join(sorted({manifest.digest.hex() for manifest in manifests}))
        raise CheckpointError(f"no member offers the weights {wanted.hex()}: expected one of {offered}")

    def _offers(self, server: ServerRecord) -> bool:
        is_there = server.state in (ServerState.ONLINE, ServerState.DRAINING)
        is_same = server.revision == self._revision and bool(server.weights)
        return is_there and is_same

    async def _ask(self, server: ServerRecord) -> OfferingMember | None:
        """Ask a server for its offer; return None if it does not answer correctly."""
        try:
            async with asyncio.timeout(_OFFER_S), translated(server.peer_id):
                stub = await self._stub(server)
                data = bytearray()
                async for part in stub.GetOffer(pb.OfferRequest()):
                    data += part.data
                    if len(data) > MAX_MANIFEST_BYTES:
                        raise BadReply("its offer is too long", server.peer_id)
            async with self._parsing:
                known = self._manifests.get(server.weights)
                offer = await asyncio.to_thread(HeldPieces.parse, bytes(data), server.weights, known)
                self._manifests[server.weights] = offer.manifest
            if (offer.manifest.model, offer.manifest.revision) != (server.model, server.revision):
                raise BadReply("it offers files of another model than its record says", server.peer_id)
        except (SwarmError, TimeoutError, OSError) as error:
            _logger.info("no weights are taken from %s: %s", server.short_id, error or "it does not answer")
            return None
        return OfferingMember(server.peer_id, offer, partial(_read, stub, server.peer_id))


async def _read(stub: ServiceStub, peer_id: str, digest: bytes) -> AsyncGenerator[bytes, None]:
    async with translated(peer_id):
        call = stub.GetPiece(pb.PieceRequest(sha256=digest))
        try:
            async for part in call:
                yield part.data
        finally:
            call.cancel()
