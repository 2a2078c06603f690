"""The wire form of statements: signed by their senders, and endorsed by peers that have relayed them late."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from hashlib import sha256

from swarm_protocol.net.identity import Identity, verified_signer
from swarm_training.broadcast.wire import StatementSlot, parse, place_of
from swarm_training.pb import training_robust_pb2 as pb

MAX_ENDORSEMENTS = 64
_SAID = b"swarm.training.robust.v1.Said:"  # domain separation: the key's other signatures are not valid here
_ENDORSEMENT = b"swarm.training.robust.v1.Endorsement:"
_signer_of = lru_cache(maxsize=4096)(partial(verified_signer, no_key="the key of a statement is no key of a peer"))


@dataclass(frozen=True)
class SignedStatement:
    """A signed statement of a peer. ``digest`` identifies it: the SHA-256 of the key and the content."""

    content: bytes
    public_key: bytes
    signature: bytes

    @cached_property
    def digest(self) -> bytes:
        return sha256(self.public_key + self.content).digest()

    @cached_property
    def said(self) -> pb.Said:
        """Return the parsed content. Raise ValueError if it is not a statement."""
        return parse(self.content)

    @cached_property
    def place(self) -> StatementSlot:
        return place_of(self.said)

    @cached_property
    def sender(self) -> str:
        """Return the peer id of the signer. Raise ValueError if the signature is wrong."""
        return _signer_of(_SAID + self.content, self.public_key, self.signature)

    @classmethod
    def make(cls, said: pb.Said, identity: Identity) -> SignedStatement:
        content = said.SerializeToString(deterministic=True)
        return cls(content, identity.public_key, identity.private_key.sign(_SAID + content))

    @classmethod
    def from_proto(cls, message: pb.Statement) -> SignedStatement:
        return cls(message.content, message.public_key, message.signature)

    def to_proto(self, endorsements: Iterable[pb.Endorsement] = ()) -> pb.Statement:
        return pb.Statement(
            content=self.content, public_key=self.public_key, signature=self.signature, endorsements=endorsements
        )


def endorse(statement: SignedStatement, identity: Identity) -> pb.Endorsement:
    signature = identity.private_key.sign(_ENDORSEMENT + statement.digest)
    return pb.Endorsement(public_key=identity.public_key, signature=signature)


def endorsers_of(statement: SignedStatement, endorsements: Iterable[pb.Endorsement]) -> dict[str, pb.Endorsement]:
    """Return the valid endorsements by peer id, the first of each peer, without the sender's."""
    found: dict[str, pb.Endorsement] = {}
    for endorsement in list(endorsements)[:MAX_ENDORSEMENTS]:
        try:
            peer_id = _signer_of(_ENDORSEMENT + statement.digest, endorsement.public_key, endorsement.signature)
        except ValueError:
            continue
        if peer_id != statement.sender:
            found.setdefault(peer_id, endorsement)
    return found
