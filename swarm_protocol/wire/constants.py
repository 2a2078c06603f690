"""Constants of the wire: version, gRPC options, size limits."""

from __future__ import annotations

WIRE_VERSION = 8

MAX_POSITIONS_WITH_AXES = 1 << 20  # the longest text of a model whose pictures have positions on several axes
PAGE_TOKENS = 32  # servers recognise equal prompts in pages of this many positions; chunks at page starts share best

# A session's ordinary steps are numbered from here on. Lower numbers are for earlier steps, when the session is
# replayed to a server that replaces another one.
FIRST_STEP = 1 << 32

MIB = 1 << 20
PART_BYTES = 1 * MIB  # larger tensors travel in parts of this size
MAX_TENSOR_BYTES = 256 * MIB  # of one tensor, encoded; clients split larger batches

# A message has the first part of a tensor, its metadata, and little else.
MAX_MESSAGE_BYTES = 2 * MIB
MAX_MASK_BYTES = MIB // 2  # as bits: 128 rows with 32k positions
MAX_POSITION_IDS = 3 * MIB // 32  # in one message, four bytes each
MAX_JOINED = 8192  # rows × positions of a run that attend to one another, which no end of a step cuts
MAX_BATCH_SIZE = 4096
MAX_ADDITIONS = 16  # blocks after which a step's pictures add something to the hidden states
MAX_CHANGES = 8  # of a session before one step; clients merge them into three
MAX_WINDOWS = 64  # kinds of attention windows among the blocks of a server
MAX_ADDRESSES = 16  # of one server
MAX_NAME_CHARS = 512  # of models, revisions, peers, addresses, adapters
MAX_RESENT = 64  # steps in one message; the next two limit the total
MAX_RESENT_STEPS = 1 << 15
MAX_RESENT_BYTES = 64 * MIB
MAX_BUNDLED = 64  # steps or answers of different sessions in one message; the next limits each
MAX_BUNDLED_BYTES = MIB // 8
MAX_UNTAKEN = 4  # steps of a session in flight to the next server, so that a slow server slows those before it
MAX_NUMBER_JUMP = 1 << 20  # from one step to the next, because a failed call may have had so many steps

MAX_ECHO_BYTES = 1 * MIB
MAX_SUMMANDS = 4096  # passes in one sum of gradients
MAX_ADAPTER_BYTES = 256 * MIB  # of one adapter over one span, serialised

_KEEPALIVE = [
    # These detect silence: without ping_timeout a stopped process is noticed after 65 s, with it after about 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),  # home routers forget connections that are silent for a minute
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
CLIENT_OPTIONS = [*_KEEPALIVE, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
SERVER_OPTIONS = [
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),  # 120 s by default: a connection costs an attacker nothing before TLS
    ("grpc.so_reuseport", 0),  # a second server on a port in use fails, and does not share its connections
]
