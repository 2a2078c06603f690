"""Records of servers: what is written is what is read, and what strangers write is checked."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.dht.records import (
    MAX_BLOCKS,
    MAX_BLOCKS_PER_S,
    MAX_FORWARD_BLOCKS_PER_S,
    MAX_NETWORK_TOKENS_PER_S,
    ServerRecord,
    ServerState,
    SwarmView,
    WorkTotals,
    models_key,
    servers_key,
)
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span, runs_without
from swarm_protocol.wire.constants import MAX_ADDRESSES, MAX_NAME_CHARS
from tests.unit.support import server_record

texts = st.text("aZ0/:é漢", max_size=5)
float32 = st.floats(min_value=0, width=32, allow_infinity=False)
speeds = st.floats(min_value=0, max_value=1000, width=32)
kinds = st.text("aZ0_.-", max_size=5)
spans = st.tuples(st.integers(0, 30), st.integers(0, 30)).filter(lambda ends: ends[0] < ends[1])
records = st.builds(
    ServerRecord,
    peer_id=texts,
    addresses=st.lists(texts, max_size=MAX_ADDRESSES).map(tuple),
    model=texts,
    revision=texts,
    num_blocks=st.integers(30, MAX_BLOCKS),
    span=spans.map(lambda ends: Span(*ends)),
    state=st.sampled_from(ServerState),
    quant=kinds,
    dtype=kinds,
    tokens_per_s=speeds,
    cache_tokens_left=st.integers(0, 2**64 - 1),
    queue_delay_s=float32,
    tls_fingerprint=st.binary(max_size=32),
    next_hop_rtts_s=st.dictionaries(texts, float32, max_size=3),
    adapters=st.lists(texts, max_size=3).map(tuple),
    wire_version=st.integers(0, 2**32 - 1),
    software_version=texts,
    max_request_bytes=st.integers(0, 2**32 - 1),
    forward_tokens_per_s=speeds,
    network_tokens_per_s=speeds,
    pinned=st.booleans(),
    next_span=st.none() | spans.map(lambda ends: Span(*ends)),
    token=st.binary(max_size=100),
    cache_tokens=st.integers(0, 2**64 - 1),
    relay_address=texts,
    weights=st.binary(max_size=32),
    joins=st.booleans(),
    members=st.integers(1, 2**32 - 1),
    work=st.builds(
        WorkTotals, st.integers(0, 2**50), st.integers(0, 2**50), st.integers(0, 2**50), st.floats(2e7, 1e9, width=32)
    ),
)


@given(records)
def test_round_trip(record: ServerRecord) -> None:
    assert ServerRecord.parse(record.to_proto().SerializeToString()) == record


def test_every_field_of_the_contract_is_written() -> None:
    record = server_record(
        revision="r", quant="int8", cache_tokens_left=1, queue_delay_s=0.5, tls_fingerprint=b"f", adapters=("a",),
        next_hop_rtts_s={"other": 0.25}, software_version="1", forward_tokens_per_s=2.0, network_tokens_per_s=3.0,
        pinned=True, next_span=Span(1, 2), token=b"t", work=WorkTotals(1, 2, 3, 4.0), cache_tokens=9, codecs=("int4",),
        relay_address="/ip4/192.0.2.1/tcp/1/p2p/QmRelay", weights=b"w", joins=True, members=2,
    )  # fmt: skip
    written = {field.name for field, _ in record.to_proto().ListFields()}
    assert written == {field.name for field in pb.ServerRecord.DESCRIPTOR.fields}
    assert not server_record().to_proto().members  # what it was before there were groups


def malformed(**fields: object) -> bytes:
    message = server_record().to_proto()
    for name, value in fields.items():
        if isinstance(value, (pb.Span, pb.Work, dict)):
            message.ClearField(name)
            message.MergeFrom(pb.ServerRecord(**{name: value}))
        else:
            setattr(message, name, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xff", "no server record"),
        (b"", "no range of blocks"),
        (malformed(num_blocks=3), "outside the model, which has 3 blocks"),
        (malformed(blocks=pb.Span(start=3, end=3)), "no range of blocks"),
        (malformed(state=0), "ServerState"),
        (malformed(tokens_per_s=math.nan), "measurement"),
        (malformed(tokens_per_s=math.inf), "measurement"),
        (malformed(tokens_per_s=-1.0), "measurement"),
        (malformed(forward_tokens_per_s=math.nan), "measurement"),
        (malformed(network_tokens_per_s=-1.0), "measurement"),
        (malformed(next_blocks=pb.Span(start=4, end=9)), "outside the model, which has 8 blocks"),
        (malformed(queue_delay_s=-60.0), "measurement"),
        *((malformed(work=pb.Work(uptime_s=time_s)), "uptime") for time_s in (math.nan, math.inf, -1.0)),
        (malformed(next_hop_rtts_s={"other": -0.5}), "measurement"),
        (malformed(next_hop_rtts_s={"other\n": 0.5}), "is no name"),
        (malformed(model="m" * (MAX_NAME_CHARS + 1)), "is no name: expected 512 printable characters"),
        *((malformed(**{name: "\x1b[2J"}), r"x1b\[2J' is no name") for name in ("peer_id", "model", "quant", "dtype")),
        (malformed(num_blocks=2**32 - 1), "4294967295 blocks: expected at most 4096"),
        (malformed(quant="q" * 33), "is no name of a kind"),
        (malformed(tls_fingerprint=b"f" * 33), "33 bytes: expected 32"),
        (malformed(next_hop_rtts_s={str(number): 0.5 for number in range(65)}), "65 round-trip times"),
        (server_record(adapters=("a",) * 257).to_proto().SerializeToString(), "257 adapters: expected at most 256"),
        (server_record(addresses=("a\n",)).to_proto().SerializeToString(), "is no name"),
        (server_record(addresses=("a",) * 17).to_proto().SerializeToString(), "17 addresses: expected at most 16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_records_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ServerRecord.parse(data)


@given(st.binary(max_size=200), st.integers(0, 60))
def test_any_bytes_give_a_record_or_a_refusal(junk: bytes, position: int) -> None:
    valid = malformed()
    for data in (junk, valid[:position] + junk, valid[:position] + junk + valid[position:]):
        try:
            record = ServerRecord.parse(data)
        except ValueError:
            continue
        assert 0 <= record.span.start < record.span.end <= record.num_blocks


def test_speeds_that_no_hardware_has_are_cut() -> None:
    speeds = {name: 1e30 for name in ("tokens_per_s", "forward_tokens_per_s", "network_tokens_per_s")}
    record = ServerRecord.parse(malformed(**speeds))
    assert record.tokens_per_s == MAX_BLOCKS_PER_S / 4
    assert record.forward_tokens_per_s == MAX_FORWARD_BLOCKS_PER_S / 4
    assert record.network_tokens_per_s == MAX_NETWORK_TOKENS_PER_S


def test_work_that_no_hardware_can_have_done_is_cut() -> None:
    for uptime_s, most in ((0.0, 0), (2.0, 2 * MAX_FORWARD_BLOCKS_PER_S), (1e9, 2**53)):
        work = pb.Work(decoded=7, prompts=2**64 - 1, passes=2**64 - 1, uptime_s=uptime_s)
        assert ServerRecord.parse(malformed(work=work)).work == WorkTotals(min(7, most), most, most, uptime_s)


def test_short_id_tells_servers_apart() -> None:
    assert server_record("QmSameBeginning111111").short_id != server_record("QmSameBeginning222222").short_id


def test_equal_swarms_give_equal_views() -> None:
    servers = [server_record(peer, blocks) for peer in "cab" for blocks in ("0:4", "2:8", "0:8")]
    view = SwarmView.of(servers)
    for seed in range(10):
        random.Random(seed).shuffle(servers)
        assert SwarmView.of(servers) == view


@given(st.lists(st.tuples(spans, st.sampled_from(ServerState)), max_size=6), st.integers(1, 30))
def test_replicas_count_the_online_servers_of_each_block(servers: list, num_blocks: int) -> None:
    view = SwarmView.of(
        server_record(str(index), f"{start}:{end}", num_blocks=30, state=state)
        for index, ((start, end), state) in enumerate(servers)
    )
    expected = [
        sum(start <= block < end and state == ServerState.ONLINE for (start, end), state in servers)
        for block in range(num_blocks)
    ]
    assert view.replicas(num_blocks) == expected


@given(st.lists(st.integers(0, 2), max_size=20))
def test_missing_spans_are_the_maximal_gaps(replicas: list[int]) -> None:
    spans = runs_without(replicas)
    assert [block for span in spans for block in span] == [b for b, count in enumerate(replicas) if count == 0]
    assert all(left.end < right.start for left, right in itertools.pairwise(spans))


def test_swarms_and_models_have_keys_of_their_own() -> None:
    keys = [servers_key(swarm, model) for swarm in ("a", "b") for model in ("m", "n")]
    assert len({*keys, models_key("a", 0), models_key("a", 1), models_key("b", 0)}) == 7
