"""Messages as honest clients of the attacked server make them, or nearly so; the fuzzer changes them further."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.net.identity import peer_id_of
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.verification.evidence import SEED_BYTES, probe
from swarm_protocol.verification.statements import DIRECTIONS, SKETCH_POSITIONS, digest_of
from swarm_protocol.wire.codec import encode, encode_joined, encode_mask, encode_positions
from swarm_protocol.wire.constants import FIRST_STEP, WIRE_VERSION
from swarm_protocol.wire.session_keys import push_key_of

_DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HonestRequests:
    """What may be asked of one server."""

    record: ServerRecord
    hidden_size: int

    def contract(self) -> pb.Contract:
        record = self.record
        blocks = pb.Span(start=record.span.start, end=record.span.end)
        return pb.Contract(wire_version=WIRE_VERSION, model=record.model, revision=record.revision, blocks=blocks)

    def opening(self, key: bytes, chance: Random, next_hop: pb.NextHop | None = None) -> pb.SessionRequest:
        message = pb.Open(contract=self.contract(), session_key=key, batch_size=1, next=next_hop)
        message.reserve_tokens = chance.choice((0, 0, 4, 16))
        return pb.SessionRequest(open=message)

    def hop(self, session_key: bytes) -> pb.NextHop:
        """A session on the server itself."""
        return pb.NextHop(peer_id=self.record.peer_id, push_key=push_key_of(session_key))

    def plain_step(self, number: int, start: int, hidden: torch.Tensor) -> pb.Step:
        """Whose outputs are known."""
        return pb.Step(number=FIRST_STEP + number, start_position=start, hidden=encode(hidden)[0])

    def step(self, number: int, start: int, num_tokens: int, chance: Random) -> tuple[pb.Step, list[bytes]]:
        """With this and that, which does not always fit the session, and the parts that follow it."""
        length = start + num_tokens
        hidden, parts = self.hidden(chance.choice((1, 1, 1, 1, 1, 2)), num_tokens, chance)
        step = pb.Step(number=FIRST_STEP + number, start_position=max(0, start + _slip(chance)), hidden=hidden)
        if chance.random() < 0.3:
            step.attention_mask.CopyFrom(encode_mask(random_mask(1, max(1, length + _slip(chance)), chance)))
        if chance.random() < 0.3:
            first = start + _slip(chance)
            step.position_ids.CopyFrom(encode_positions(torch.arange(first, first + num_tokens)[None]))
        if chance.random() < 0.3:
            step.outputs_wanted = max(0, chance.randint(0, num_tokens) + _slip(chance))
        step.every_block = chance.random() < 0.1
        for _ in range(chance.choice((0, 0, 0, 1, 2))):
            rows = chance.choices((0, 0, 0, 0, 1, 5), k=chance.choice((1, 1, 1, 2)))
            changes = (
                pb.Change(reorder=pb.Reorder(indices=rows)),
                pb.Change(crop=pb.Crop(length=chance.choice((start, start // 2, start + 1)))),
                pb.Change(record_past=pb.RecordPast()),
            )
            step.changes.append(chance.choice(changes))
        if chance.random() < 0.2:
            step.joined.CopyFrom(random_joined(1, max(1, num_tokens + _slip(chance)), chance))
        return step, parts

    def forward(self, chance: Random, keep_key: bytes = b"") -> tuple[pb.Forward, list[bytes]]:
        batch_size, num_tokens = chance.choice((1, 1, 2, 3)), chance.randint(1, 9)
        hidden, parts = self.hidden(batch_size, num_tokens, chance)
        message = pb.Forward(contract=self.contract(), hidden=hidden, keep_key=keep_key)
        if chance.random() < 0.3:
            message.attention_mask.CopyFrom(encode_mask(random_mask(batch_size, num_tokens, chance)))
        elif chance.random() < 0.3:
            message.packed = True
            message.position_ids.CopyFrom(encode_positions(torch.arange(num_tokens).remainder(3)[None]))
        if chance.random() < 0.2:
            message.dropout_seed = chance.getrandbits(64)
        message.sign = chance.random() < 0.2
        if chance.random() < 0.2:
            message.joined.CopyFrom(random_joined(batch_size, num_tokens, chance))
        return message, parts

    def evidence(self, chance: Random) -> pb.Evidence:
        """About the blocks, or some of them, signed by nobody: the key is none that anybody has."""
        seed, span = chance.randbytes(SEED_BYTES), self.record.span
        size = chance.choice((self.hidden_size, self.hidden_size, self.hidden_size, 1, 4096))
        numbers = RSAPublicNumbers(65537, chance.getrandbits(2048) | 1 << 2047 | 1)
        public_key = numbers.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        content = pb.Statement(
            peer_id=peer_id_of(public_key),
            model=self.record.model,
            revision=self.record.revision,
            blocks=pb.Span(start=chance.randrange(span.start, span.end), end=span.end),
            quant=self.record.quant,
            dtype=self.record.dtype,
            device=self.record.device,
            input_digest=digest_of(probe(seed, size)),
            sketch=[chance.gauss(0, 1) for _ in range(DIRECTIONS * SKETCH_POSITIONS)],
            made_at=chance.choice((0.0, 2e9, 1e300)),
        ).SerializeToString(deterministic=True)
        statement = pb.SignedStatement(content=content, signature=chance.randbytes(344), public_key=public_key)
        return pb.Evidence(statement=statement, seed=seed, hidden_size=size)

    def adapter(self, chance: Random) -> pb.Adapter:
        rank, size = chance.choice((1, 2, 8)), self.hidden_size
        low_rank = [
            pb.LowRank(
                block=block,
                module="self_attn.q_proj",
                scaling=1.5,
                dropout=chance.choice((0.0, 0.1)),
                a=encode(random_tensor((rank, size), chance))[0],
                b=encode(random_tensor((size, rank), chance))[0],
            )
            for block in range(self.record.span.start, self.record.span.end)
            if chance.random() < 0.5
        ]
        prompts = [pb.Prompt(block=self.record.span.start, values=encode(random_tensor((2, size), chance))[0])]
        return pb.Adapter(salt=chance.randbytes(16), low_rank=low_rank, prompts=prompts[: chance.choice((0, 1))])

    def hidden(self, batch_size: int, num_tokens: int, chance: Random) -> tuple[pb.Tensor, list[bytes]]:
        """Hidden states, now and then in parts smaller than necessary."""
        tensor = random_tensor((batch_size, num_tokens, self.hidden_size), chance).to(chance.choice(_DTYPES))
        wire, _ = encode(tensor, chance.choice((pb.RAW, pb.RAW, pb.RAW, *pb.Codec.values())))
        if chance.random() < 0.7:
            return wire, []
        cuts = sorted(chance.sample(range(len(wire.data)), 2))
        data, wire.data = wire.data, wire.data[: cuts[0]]
        return wire, [data[cuts[0] : cuts[1]], data[cuts[1] :]]


def _slip(chance: Random) -> int:
    return chance.choice((*[0] * 12, -1, 1, 40))


def random_tensor(shape: tuple[int, ...], chance: Random) -> torch.Tensor:
    generator = np.random.default_rng(chance.getrandbits(64))
    return torch.from_numpy(generator.standard_normal(shape, np.float32))


def random_joined(batch_size: int, num_tokens: int, chance: Random) -> pb.Tensor:
    """Positions that see later ones; now and then the last one, which has none, or a kind that there is not."""
    kinds = torch.tensor([chance.choices((0, 1, 2, 3), (8, 8, 8, 1), k=num_tokens) for _ in range(batch_size)])
    kinds[:, -1] *= chance.random() < 0.1
    return encode_joined(kinds)


def random_mask(batch_size: int, length: int, chance: Random) -> torch.Tensor:
    """Rows that are padded on the left."""
    padding = torch.tensor([[chance.randrange(length)] for _ in range(batch_size)])
    return (torch.arange(length)[None] >= padding).to(torch.int64)
