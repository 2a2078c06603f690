"""Constants of the wire: version, gRPC options, size limits."""

from __future__ import annotations

WIRE_VERSION = 6

PAGE_TOKENS = 32  # servers recognise equal prompts in pages of so many positions; chunks that begin at one share best

# Ordinary steps of a session are numbered from here on; lower numbers are for what it had computed before, when another
# server takes its place and the session is replayed.
FIRST_STEP = 1 << 32

MIB = 1 << 20
PART_BYTES = 1 * MIB  # larger tensors travel in parts of this size
MAX_TENSOR_BYTES = 256 * MIB  # of one tensor, encoded; clients split larger batches

MAX_ECHO_BYTES = 1 * MIB
MAX_ADAPTER_BYTES = 256 * MIB  # of one adapter over one span, serialised

_KEEPALIVE = [
    # Silence is failure too: without ping_timeout a stopped process is noticed after 65 s, with it after about 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_send_message_length", 64 * MIB),
    ("grpc.max_receive_message_length", 64 * MIB),
]
CLIENT_OPTIONS = [*_KEEPALIVE, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
SERVER_OPTIONS = [*_KEEPALIVE, ("grpc.http2.min_ping_interval_without_data_ms", 5_000), ("grpc.so_reuseport", 0)]
