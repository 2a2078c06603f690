"""The checks that a request must pass before the server spends memory or time on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm_protocol.errors import PeerMoved, RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import ACROSS_WINDOWS, most_tokens
from swarm_protocol.wire.codec import Assembler, decode, decode_mask, shown_shape
from swarm_protocol.wire.constants import (
    MAX_ADDITIONS,
    MAX_BATCH_SIZE,
    MAX_CHANGES,
    MAX_NAME_CHARS,
    MAX_TENSOR_BYTES,
    MAX_WINDOWS,
    WIRE_VERSION,
)
from swarm_protocol.wire.printable import printable

MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64
_MAX_USER_CHARS = 64
_SHOWN_CHARS = 60
_FLOATS = frozenset((pb.FLOAT32, pb.BFLOAT16, pb.FLOAT16))


@dataclass(frozen=True)
class RequestValidator:
    """The request validator of one hosted span."""

    model: str
    revision: str
    hosted: Span
    hidden_size: int
    max_positions: int | None  # None: the model has no limit
    position_axes: int = 1  # see ``Family.position_axes``
    max_tensor_bytes: int = MAX_TENSOR_BYTES
    max_step_tokens: int = 1 << 31  # rows × positions of one step of more than one position
    joins: bool = True  # whether the blocks can let positions attend to later ones

    def blocks(self, contract: pb.Contract) -> Span:
        """Return the requested span.

        Raises:
            PeerMoved: another wire version, model or revision, or blocks that are not hosted here.
            RequestRejected: the blocks are not a valid span.
        """
        if contract.wire_version != WIRE_VERSION:
            raise PeerMoved(
                f"this server speaks wire version {WIRE_VERSION}, the client {contract.wire_version}: "
                "update the older of the two"
            )
        if (contract.model, contract.revision) != (self.model, self.revision):
            raise PeerMoved(
                f"this server serves {self.model} at revision {self.revision}, the client expects "
                f"{printable(contract.model, _SHOWN_CHARS)} at revision {printable(contract.revision, _SHOWN_CHARS)}"
            )
        try:
            blocks = Span(contract.blocks.start, contract.blocks.end)
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        if not self.hosted.covers(blocks):
            raise PeerMoved(f"this server holds blocks {self.hosted}, not {blocks}")
        return blocks

    def batch_size(self, batch_size: int) -> int:
        """Return the batch size. Raise RequestRejected if it is out of range."""
        if not 1 <= batch_size <= MAX_BATCH_SIZE:
            raise RequestRejected(f"batch size {batch_size} is out of range: expected 1 to {MAX_BATCH_SIZE}")
        return batch_size

    def codec(self, codec: pb.Codec) -> None:
        """Check the codec of data to be sent. Raise RequestRejected if its number is unknown."""
        if codec not in pb.Codec.values():
            raise RequestRejected(f"codec {codec} is unknown: expected one of {sorted(pb.Codec.values())}")

    def hidden(self, wire: pb.Tensor, *, stacked: bool = False) -> Assembler:
        """Check the header of hidden states [batch, tokens, hidden_size], and return an assembler for their parts.

        ``stacked``: they may come with additions, see ``BlockInput.stacked``.
        """
        shape: Sequence[int] = wire.shape
        if stacked and len(shape) == 4 and 1 < shape[2] <= 1 + MAX_ADDITIONS:
            shape = [*shape[:2], shape[3]]
        if len(shape) != 3 or shape[2] != self.hidden_size or shape[1] < 1:
            expected = f"[batch, tokens, {self.hidden_size}]"
            raise RequestRejected(f"hidden states have shape {shown_shape(wire)}: expected {expected}")
        self.batch_size(shape[0])
        if wire.dtype not in _FLOATS:
            raise RequestRejected("hidden states are no floating-point tensor: expected float32, bfloat16 or float16")
        return Assembler(wire, self.max_tensor_bytes)

    def new_positions(self, wire: pb.Tensor, past: int = 0) -> Assembler:
        """Check ``hidden`` after ``past`` other positions; too many are refused before memory is reserved."""
        if len(wire.shape) in (3, 4):
            self.length(past + wire.shape[1])
        return self.hidden(wire, stacked=True)

    def stored(self, stored: pb.Stored) -> Assembler:
        """Return an assembler for keys and values; the session later compares them with what it keeps."""
        if len(stored.num_kept) > MAX_WINDOWS:
            raise RequestRejected(
                f"keys and values come with {len(stored.num_kept)} kinds of windows: expected at most {MAX_WINDOWS}"
            )
        wire = stored.data
        if wire.dtype != pb.UINT8 or wire.codec != pb.RAW or len(wire.shape) != 1:
            raise RequestRejected("keys and values come as one row of bytes")
        return Assembler(wire, self.max_tensor_bytes)

    def changes(self, changes: Sequence[pb.Change]) -> None:
        """Check the changes of a session before a step."""
        if len(changes) > MAX_CHANGES:
            raise RequestRejected(f"a step comes with {len(changes)} changes: expected at most {MAX_CHANGES}")
        for change in changes:
            if change.HasField("reorder"):
                self.batch_size(len(change.reorder.indices))

    def next_hop(self, hop: pb.NextHop) -> None:
        """Check the address of a session's next hop or copy."""
        require_key(hop.push_key, "the next session's push key")
        if len(hop.peer_id) > MAX_NAME_CHARS:
            raise RequestRejected(
                f"the next server's peer id has {len(hop.peer_id)} characters: expected at most {MAX_NAME_CHARS}"
            )
        self.codec(hop.codec)

    def step_tokens(self, batch_size: int, num_tokens: int, joined: pb.Tensor | None = None) -> None:
        """Check a step's size, because no step may delay the others for long.

        With ``joined``, it may be longer; see ``most_tokens``.
        """
        most = most_tokens(self.max_step_tokens, batch_size)
        if num_tokens > most and joined is not None:
            most = most_tokens(self.max_step_tokens, batch_size, self.joined(joined, batch_size, num_tokens))
        if num_tokens > most:
            raise RequestRejected(
                f"a step of {batch_size} × {num_tokens} positions is too long: expected at most "
                f"{self.max_step_tokens} in all; send it in several steps"
            )

    def positions(self, wire: pb.Tensor, batch_size: int, num_tokens: int) -> torch.Tensor:
        """Return the checked position ids, int64 [batch or 1, num_tokens], or with axes where the model has them."""
        expected = [[rows, num_tokens] for rows in (batch_size, 1)]
        if self.position_axes > 1:
            expected += [[*shape, self.position_axes] for shape in expected]
        if list(wire.shape[:4]) not in expected or wire.dtype != pb.INT32:
            raise RequestRejected(
                f"position ids have shape {shown_shape(wire)}: expected int32 [{batch_size}, {num_tokens}]"
            )
        ids = decode(wire).to(torch.int64)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (self.max_positions is not None and high >= self.max_positions):
            raise RequestRejected(f"position ids from {low} to {high} are outside the model's {self.max_positions}")
        return ids

    def joined(self, wire: pb.Tensor, batch_size: int, num_tokens: int) -> torch.Tensor:
        """Return the checked ``BlockInput.joined``, uint8 [batch_size, num_tokens]."""
        if not self.joins:
            raise RequestRejected("positions of this model cannot attend to later ones: its blocks take them in order")
        if list(wire.shape[:3]) != [batch_size, num_tokens] or wire.dtype != pb.UINT8:
            raise RequestRejected(
                f"joined positions have shape {shown_shape(wire)}: expected uint8 [{batch_size}, {num_tokens}]"
            )
        joined = decode(wire)
        if int(joined.max()) > ACROSS_WINDOWS or bool(joined[:, -1].any()):
            raise RequestRejected(
                f"joined positions are numbered up to {int(joined.max())}: expected at most {ACROSS_WINDOWS}, and 0 at "
                "the last position, since a step has all positions of a picture"
            )
        return joined

    def mask(self, wire: pb.AttentionMask, batch_size: int, num_positions: int) -> torch.Tensor:
        return decode_mask(wire, batch_size, num_positions)

    def length(self, num_positions: int) -> None:
        """Raise RequestRejected if a sequence has more positions than the model allows."""
        if self.max_positions is not None and num_positions > self.max_positions:
            raise RequestRejected(
                f"{num_positions} positions are more than the model's {self.max_positions}: shorten the prompt"
            )

    def at_most(self, num_positions: int) -> int:
        """Return ``num_positions``, or the model's maximum if that is lower."""
        return num_positions if self.max_positions is None else min(num_positions, self.max_positions)


def require_user(user: str) -> None:
    """Raise RequestRejected if the name of a client's user is too long to be kept."""
    if len(user) > _MAX_USER_CHARS:
        raise RequestRejected(f"the user's name has {len(user)} characters: expected at most {_MAX_USER_CHARS}")


def require_key(key: bytes, what: str) -> None:
    """Raise RequestRejected if a key that a client chose is too short to be a secret, or too long to be kept."""
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise RequestRejected(f"{what} has {len(key)} bytes: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")
