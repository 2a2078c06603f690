"""Everything a server can be told, in one frozen value; the command line takes its defaults from here."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

from swarm_protocol.default_model import DEFAULT_MODEL
from swarm_protocol.notes import DEFAULT_SWARM
from swarm_protocol.span import Span
from swarm_server.quantization import METHODS

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ServerConfig:
    """Raises ValueError at construction if a field is out of its range."""

    model: str = DEFAULT_MODEL  # hub name or path
    model_revision: str | None = None  # of a hub model
    blocks: Span | None = None  # None: the server chooses
    quant: str = "int8"
    dtype: str = "auto"  # of computation; auto: float32 on CPU, bfloat16 on CUDA
    device: str = "auto"  # auto: CUDA if there is any
    host: str = "127.0.0.1"
    port: int = 0  # gRPC; 0: any free one
    dht_port: int = 0
    announce_address: str | None = None  # HOST or HOST:PORT that others should use
    initial_peers: tuple[str, ...] = ()
    swarm: str = DEFAULT_SWARM
    identity: Path | None = None  # None: a new one each start
    cache_tokens: int | None = None  # over all sessions; None: from free memory
    throughput: float | None = None  # tokens per second to announce; None: measured
    queue_size: int = 64  # requests waiting for the compute thread; more are refused
    session_idle_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.quant not in METHODS:
            raise ValueError(f"quantisation {self.quant!r} is unknown: expected one of {', '.join(METHODS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown: expected one of {', '.join(DTYPES)}")
        for name, port in (("port", self.port), ("dht_port", self.dht_port)):
            if not 0 <= port < 65536:
                raise ValueError(f"{name} {port} is no port: expected 0 to 65535")
        if self.cache_tokens is not None and self.cache_tokens < 1:
            raise ValueError(f"cache_tokens is {self.cache_tokens}: expected at least 1")
        if self.throughput is not None and not 0 < self.throughput < inf:
            raise ValueError(f"throughput is {self.throughput}: expected a number of tokens per second above 0")
