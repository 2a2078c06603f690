"""The server's configuration in one frozen value; the command line takes its defaults from here."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from swarm_models.checkpoints.default_model import DEFAULT_MODEL, FROM_SWARM, check_source, check_weights
from swarm_models.quants import KV_METHODS, METHODS
from swarm_protocol.dht.lan_discovery import require_zeroconf
from swarm_protocol.dht.records import KV8
from swarm_protocol.net.hosts import split_address
from swarm_protocol.net.ip_networks import parse_host
from swarm_protocol.process.local_registry import DEFAULT_SWARM
from swarm_protocol.size import parse_size
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import MIB
from swarm_server.placement.placement import MARGIN

DTYPES = ("auto", "float32", "bfloat16", "float16")
AUTO, ALWAYS, NEVER = "auto", "always", "never"  # whether files are offered
PREFIX_CACHES = ("auto", "all", "own", "none")
RELAYS = ("auto", "always", "never")
_AT_LEAST_ONE = (
    *("num_blocks", "memory_bytes", "cache_tokens", "cache_bytes", "adapter_bytes", "incoming_bytes"),
    *("chunk_tokens", "max_sessions", "group_size"),
)
_AT_LEAST_ZERO = ("relay_bytes_per_s", "weight_cache_bytes", "kv_offload_memory_bytes", "kv_offload_disk_bytes")
MOST_MEMBERS = 16  # of a group


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of one server. The construction raises ValueError if a field is out of its range."""

    model: str = DEFAULT_MODEL  # hub name or path
    model_revision: str | None = None  # of a hub model
    blocks: Span | None = None  # pinned; None: the server chooses, and moves where it is needed
    initial_blocks: Span | None = None  # hosted first; later the server may move
    num_blocks: int | None = None  # number of blocks to choose; None: from memory
    memory_bytes: int | None = None  # for blocks, keys and values; None: from free memory
    quant: str = "int8"
    dtype: str = "auto"  # of computation; auto: bfloat16 on cuda and xpu, else float32
    device: str = "auto"  # auto: a GPU (cuda, xpu or mps) if torch finds one that runs ``quant``
    devices: tuple[str, ...] = ()  # several devices that share the blocks, such as cuda:0 and cuda:1; empty: ``device``
    tensor_parallel: bool = False  # each of ``devices`` holds some of the rows of every linear layer of all blocks
    group_size: int = 1  # processes that compute each block together, this one included
    group: str | None = None  # name of a group whose members find each other in the swarm; the first leads
    group_listen: str | None = None  # HOST:PORT where the group's followers on other machines come; None: this machine
    group_key: Path | None = None  # file with the secret of a group on several machines
    group_always: bool = False  # form the group on several machines even if it is computed to be slower
    follow: str | None = None  # HOST:PORT of a leader: this process is a follower in its group, and no server
    weight_cache_bytes: int = 16 << 30  # of packed weights on disk, for all servers of this user; 0: no cache
    host: str | None = None  # None: the address that leads to the swarm; loopback if the whole swarm is on this machine
    port: int = 0  # gRPC; 0: any free port
    dht_port: int = 0
    announce_address: str | None = None  # HOST or HOST:PORT that others should use
    relay: str = "auto"  # whether others reach this server through relays; auto: if they cannot reach it directly
    relay_bytes_per_s: int = 8_000_000  # of relayed traffic for servers that cannot be reached directly; 0: no relaying
    relay_keepalive_s: float = 20.0  # of connections to relays; routers forget those that are silent for a minute
    initial_peers: tuple[str, ...] = ()
    discover: bool = False  # also find members on the local network, and let others find this server there
    swarm: str = DEFAULT_SWARM
    identity: Path | None = None  # None: a new identity at each start
    membership: Path | None = None  # file of a private swarm; None: the environment variable SWARM_MEMBERSHIP, if set
    swarm_key: str = ""  # of a private swarm; empty: the key in the membership
    open_to_clients: bool = False  # only members may be servers, but anybody may be a client
    cache_tokens: int | None = None  # over all sessions; None: cache_bytes
    cache_bytes: int | None = None  # for all sessions' keys and values, and for kept passes; None: from free memory
    kv_quant: str = "none"  # how keys and values are stored: none: in the dtype of computation; or int8
    kv_offload_memory_bytes: int = 0  # CPU memory for idle sessions' keys and values, and for prefixes; 0: none
    kv_offload_disk_bytes: int = 0  # the same on disk, where they go when that memory is full
    kv_offload_directory: Path | None = None  # where the file for them is; None: the user's cache directory
    prefix_cache: str = "auto"  # which sessions share equal prefixes; auto: see ``prefix_sharing``
    adapters: tuple[Path, ...] = ()  # directories in PEFT's format, loaded at the start; each names its adapter
    adapter_bytes: int = 352 * MIB  # for all adapters that clients send; one client's share holds the largest
    chunk_tokens: int | None = None  # positions of a prompt, computed between two decoding steps; None: by device
    max_sessions: int = 512
    throughput: float | None = None  # tokens per second to announce; None: measured
    queue_size: int = 64  # training passes waiting for the compute thread; more are refused
    incoming_bytes: int = 768 * MIB  # for requests that arrive or wait; one client's share holds two tensors
    session_idle_timeout_s: float = 600.0  # the longest time between two steps
    stall_timeout_s: float = 20.0  # within a request, in addition to the time of its next part at min_bytes_per_s
    min_bytes_per_s: float = 16 * 1024.0  # several streams share a line of 1 Mbit/s
    drain_timeout_s: float = 30.0  # for sessions to end or move when the server leaves the swarm or its blocks
    balance_margin: float = MARGIN  # the relative gain of throughput that is worth a move
    share_weights: str = AUTO  # with members that lack them: auto, always, never, or a rate such as 10MB per second
    weights: str = ""  # SHA-256 of the manifest of the files to take from the swarm; empty: the most common manifest
    metrics_port: int | None = None  # port of the metrics for Prometheus; 0: any free port; None: no metrics
    metrics_host: str = "127.0.0.1"
    no_live_line: bool = False  # on a terminal, show nothing but log lines

    def __post_init__(self) -> None:
        self._check_choices()
        if not re.fullmatch(r"auto|(cpu|cuda|xpu|mps)(:\d+)?", self.device):
            raise ValueError(f"device {self.device!r} is unknown: expected auto, cpu, cuda, cuda:1, xpu or mps")
        self._check_devices()
        self._check_group()
        self._check_weights()
        self._check_addresses()
        self._check_sizes()
        self._check_times_and_rates()
        self._check_adapters()
        self._require_at_most_one("cache_tokens", "cache_bytes")
        if self.throughput is not None and not 0 < self.throughput < inf:
            raise ValueError(f"throughput is {self.throughput}: expected a number of tokens per second above 0")

    @property
    def share_bytes_per_s(self) -> float | None:
        """Return the limit of sent bytes per second; None: what leaves sessions undisturbed; 0: nothing is sent."""
        if self.share_weights in (AUTO, ALWAYS):
            return None
        return 0.0 if self.share_weights == NEVER else float(parse_size(self.share_weights))

    def _check_choices(self) -> None:
        for name, value, known in (
            ("quantisation", self.quant, METHODS),
            ("quantisation of keys and values", self.kv_quant, KV_METHODS),
            ("dtype", self.dtype, DTYPES),
            ("prefix cache", self.prefix_cache, PREFIX_CACHES),
            ("relay", self.relay, RELAYS),
        ):
            if value not in known:
                raise ValueError(f"{name} {value!r} is unknown: expected one of {', '.join(known)}")

    def _check_addresses(self) -> None:
        if self.announce_address is not None:
            split_address(self.announce_address, 0)
        if self.discover:
            require_zeroconf()
        for name in ("port", "dht_port", "metrics_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port < 65536:
                raise ValueError(f"{name} {port} is no port: expected 0 to 65535")

    def _check_sizes(self) -> None:
        for least, names in ((1, _AT_LEAST_ONE), (0, _AT_LEAST_ZERO)):
            for name in names:
                value = getattr(self, name)
                if value is not None and value < least:
                    raise ValueError(f"{name} is {value}: expected at least {least}")
        self._require_at_most_one("blocks", "initial_blocks", "num_blocks", "memory_bytes")
        self._check_kv_offload()

    def _check_kv_offload(self) -> None:
        if 0 < self.kv_offload_disk_bytes < MIB:
            raise ValueError(f"kv_offload_disk_bytes is {self.kv_offload_disk_bytes}: expected 0 or at least {MIB}")
        directory = self.kv_offload_directory
        if directory is None:
            return
        if not self.kv_offload_disk_bytes:
            raise ValueError("--kv-offload-dir: expected --kv-offload-disk SIZE with it")
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"--kv-offload-dir {directory} is a file: expected a directory")

    def _require_at_most_one(self, *names: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} are both given: expected one of them")

    def _check_times_and_rates(self) -> None:
        if not 0 <= self.drain_timeout_s < inf:
            raise ValueError(f"drain_timeout_s is {self.drain_timeout_s}: expected a number of seconds")
        if not 1 <= self.relay_keepalive_s <= 300:
            raise ValueError(f"relay_keepalive_s is {self.relay_keepalive_s}: expected 1 to 300 seconds")
        for name in ("stall_timeout_s", "min_bytes_per_s"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}: expected a number above 0")
        if not 0 < self.balance_margin < inf:
            raise ValueError(f"balance_margin is {self.balance_margin}: expected a number above 0, such as {MARGIN}")

    def _check_adapters(self) -> None:
        names = [path.resolve().name for path in self.adapters]
        if len(set(names)) < len(names) or not all(name and name.isprintable() for name in names):
            raise ValueError(f"adapters are called like their directories: {names} are no distinct, printable names")

    def _check_weights(self) -> None:
        if self.share_weights not in (AUTO, ALWAYS, NEVER):
            try:
                is_rate = parse_size(self.share_weights) > 0
            except ValueError:
                is_rate = False
            if not is_rate:
                raise ValueError(
                    f"share_weights {self.share_weights!r} is unknown: expected auto, always, never, or bytes per "
                    "second, such as 10MB"
                )
        check_weights(self.weights)
        check_source(self.weights, self.model)

    @property
    def is_in_group(self) -> bool:
        """Return whether this process is a member of a group."""
        return self.group_size > 1 or self.follow is not None

    @property
    def announced_quant(self) -> str:
        """Return the quantisation in the server's record, by which clients know how it rounds."""
        return self.quant + (KV8 if self.kv_quant == "int8" else "")

    def without_a_member(self) -> ServerConfig:
        """Return the configuration of the same server after a follower on its machine has ended."""
        return replace(self, group_size=self.group_size - 1)

    def without_group(self) -> ServerConfig:
        """Return the configuration of the same server outside its group on several machines."""
        return replace(self, group_size=1, group=None, group_listen=None, group_key=None, group_always=False)

    def _check_group(self) -> None:
        self._check_group_addresses()
        if not self.is_in_group:
            return
        if self.group_size > MOST_MEMBERS:
            raise ValueError(f"group_size is {self.group_size}: expected at most {MOST_MEMBERS}")
        if self.quant not in ("int8", "int4"):
            raise ValueError(f"a group computes with int8 or int4, not with quant {self.quant}")
        if self.kv_quant != "none":
            raise ValueError("a group attends with the compiled kernel: expected kv_quant none")
        if self.devices or self.device.partition(":")[0] not in ("auto", "cpu"):
            raise ValueError("the members of a group compute on the CPU: expected no other device")

    def _check_group_addresses(self) -> None:
        addresses = {"--follow": self.follow, "--group-listen": self.group_listen}
        flags = [flag for flag, address in addresses.items() if address is not None]
        for flag in flags:
            port = 0
            with suppress(ValueError):
                _, port = split_address(str(addresses[flag]), 0)
            if not port:
                raise ValueError(f"{flag} {addresses[flag]!r} is no address of a group's leader: expected HOST:PORT")
        ip = None if self.group_listen is None else parse_host(split_address(self.group_listen, 0)[0])
        if ip is not None and ip.is_unspecified:
            raise ValueError(
                f"--group-listen {self.group_listen} is no address that others can reach: expected a machine's own"
            )
        self._check_group_flags([*flags, "--group"] if self.group else flags)

    def _check_group_flags(self, flags: list[str]) -> None:
        """Raise ValueError if flags do not go together; ``flags`` are those given that need other machines."""
        leads = self.group_size > 1 or self.group_listen is not None
        for is_wrong, message in (
            (self.follow and leads, "--follow is for followers: expected it without --group-size and --group-listen"),
            (self.follow and self.group, "--follow names the leader: expected it without --group"),
            (
                (self.follow or self.group) and self.model.startswith(FROM_SWARM),
                "a follower reads the model's files itself: expected --model with a directory or a model of the hub",
            ),
            (self.group_listen and self.group_size == 1, "--group-listen: expected --group-size of at least 2 with it"),
            (self.group == "", "--group '' is no name of a group: expected a word"),
            (self.group and self.group_size == 1, "--group: expected --group-size of at least 2 with it"),
            (self.group_always and not flags, "--group-always: expected --group or --group-listen HOST:PORT with it"),
            (self.group_key and not flags, "--group-key: expected --group, --group-listen or --follow with it"),
            (
                flags and not self.group_key,
                f"{''.join(flags[:1])}: expected --group-key FILE with it, the group's secret",
            ),
        ):
            if is_wrong:
                raise ValueError(message)

    def _check_devices(self) -> None:
        self._check_tensor_parallel()
        if not self.devices:
            return
        if self.device != "auto":
            raise ValueError("device and devices are both given: expected one of them")
        for name in self.devices:
            if not re.fullmatch(r"(cuda|xpu):\d+", name):
                raise ValueError(f"device {name!r} is none of several: expected a type and a number, such as cuda:0")
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices {','.join(self.devices)} name one twice: expected each once")
        if len({name.partition(":")[0] for name in self.devices}) > 1:
            raise ValueError(f"devices {','.join(self.devices)} are of several types: expected one type")
        pinned = self.blocks or self.initial_blocks
        num_blocks = self.num_blocks if pinned is None else len(pinned)
        if num_blocks is not None and num_blocks < len(self.devices) and not self.tensor_parallel:
            raise ValueError(
                f"{num_blocks} blocks cannot be split over {len(self.devices)} devices: "
                "expected at least one block for each"
            )

    def _check_tensor_parallel(self) -> None:
        if not self.tensor_parallel:
            return
        if not 2 <= len(self.devices) <= MOST_MEMBERS:
            raise ValueError(
                f"tensor_parallel is for several devices: expected 2 to {MOST_MEMBERS}, such as cuda:0,cuda:1"
            )
        if self.quant not in ("int8", "none"):
            raise ValueError(f"tensor_parallel computes with int8 or none, not with quant {self.quant}")
