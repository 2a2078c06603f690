"""A server's life: join the swarm, load blocks, serve, keep its record fresh, leave."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from importlib import metadata

import grpc
import torch
from tqdm import tqdm

from swarm_protocol.checkpoint import Checkpoint
from swarm_protocol.default_model import locate
from swarm_protocol.dht import Dht
from swarm_protocol.errors import NoSwarm
from swarm_protocol.families import describe
from swarm_protocol.identity import Certificate, Identity
from swarm_protocol.notes import DEFAULT_SWARM, Notes
from swarm_protocol.pb.swarm_pb2_grpc import add_BlocksServicer_to_server
from swarm_protocol.positions import max_positions
from swarm_protocol.records import REFRESH_S, ServerRecord, ServerState
from swarm_protocol.span import Span
from swarm_protocol.wire import SERVER_OPTIONS
from swarm_server.blocks import BlockStack, load_blocks
from swarm_server.config import ServerConfig
from swarm_server.cores import CoreShare
from swarm_server.engine import Engine
from swarm_server.host import Host
from swarm_server.kv_cache import CacheBudget, default_cache_bytes
from swarm_server.memory import available_bytes, hosted_bytes_per_block
from swarm_server.placement import choose_span
from swarm_server.prefix_cache import PrefixCache
from swarm_server.push import Neighbours
from swarm_server.quantization import Report, quantize_
from swarm_server.scheduler import Scheduler
from swarm_server.service import BlocksService
from swarm_server.throughput import decode_tokens_per_s
from swarm_server.validation import Rules

_logger = logging.getLogger(__name__)
CHUNK_TOKENS_CPU, CHUNK_TOKENS_CUDA = 64, 512
_BLOCKS_OF_FREE, _BLOCKS_OF_GIVEN = 0.6, 0.8  # of memory; what is left is for keys and values
_SHARE_CORES_S = 5.0
_GRACE_S = 2.0  # for streams that are open when the server stops


class Server:
    """One server; ``run`` is its whole life."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = dataclasses.replace(config, host=_ip_address(config.host))
        self._stop = asyncio.Event()
        self._record: ServerRecord | None = None
        self._dht: Dht | None = None
        self._measured: Callable[[], dict] = dict  # what changes while serving
        self.ready = False

    def stop(self) -> None:
        """Makes ``run`` withdraw the record and return."""
        self._stop.set()

    async def run(self) -> None:
        """Serves until ``stop``; prints one line to stdout once it is ready.

        Raises:
            ValueError, SwarmError: the configuration cannot work; one sentence says why.
        """
        config = self._config
        checkpoint = await asyncio.to_thread(Checkpoint.open, locate(config.model), config.model_revision)
        family = describe(checkpoint.config)
        if config.blocks is not None:
            config.blocks.within(family.num_blocks)
        async with AsyncExitStack() as cleanup:
            certificate = Certificate.generate()
            grpc_server, port = _bind(config, certificate)
            cleanup.push_async_callback(grpc_server.stop, _GRACE_S)
            device, dtype = _device_and_dtype(config)
            cores = cleanup.enter_context(CoreShare())
            torch.set_num_threads(cores.threads())  # of threads that have not computed yet
            loading = None
            if config.blocks is not None:  # nothing to find out first: load while joining
                loading = _start_loading(cleanup, checkpoint, config.blocks, dtype, device, config.quant)
            await self._join(cleanup)
            span = config.blocks or await self._choose_span(checkpoint, family.num_blocks, device)
            self._record = ServerRecord(
                peer_id=self._dht.peer_id,
                addresses=(_announced(config, port),),
                model=checkpoint.name,
                revision=checkpoint.revision,
                num_blocks=family.num_blocks,
                span=span,
                state=ServerState.JOINING,
                quant=config.quant,
                dtype=str(dtype).removeprefix("torch."),
                tls_fingerprint=certificate.fingerprint,
                software_version=metadata.version("swarm-lm"),
            )
            cleanup.push_async_callback(self._withdraw)
            await self._publish()
            stack = await (loading or _start_loading(cleanup, checkpoint, span, dtype, device, config.quant))
            prefix_cache = PrefixCache() if config.prefix_cache else None
            engine = await asyncio.to_thread(Engine, stack, prefix_cache=prefix_cache)
            throughput = config.throughput or await asyncio.to_thread(decode_tokens_per_s, engine, span)
            budget = _cache_budget(config, engine, hosted_bytes_per_block(checkpoint, config.quant) * len(span))
            if prefix_cache is not None:
                budget.reclaim = prefix_cache.reclaim
            scheduler = Scheduler(engine, config.queue_size, engine.mixes_rows)
            cleanup.callback(scheduler.stop)
            sharing = asyncio.ensure_future(_share_cores(cores, scheduler))
            cleanup.callback(sharing.cancel)
            neighbours = Neighbours()
            cleanup.push_async_callback(neighbours.close)
            rules = Rules(
                checkpoint.name,
                checkpoint.revision,
                span,
                family.hidden_size,
                max_positions(checkpoint.config),
                max_step_tokens=_max_step_tokens(config, engine),
            )
            host = Host(engine, scheduler, budget, rules, neighbours, config.max_sessions)
            service = BlocksService(host, lambda: self._current_record().to_proto(), config.session_idle_timeout_s)
            add_BlocksServicer_to_server(service, grpc_server)
            await grpc_server.start()
            self._record = dataclasses.replace(self._record, state=ServerState.ONLINE, tokens_per_s=throughput)
            self._measured = lambda: {
                "cache_tokens_left": budget.tokens_left,
                "queue_delay_s": scheduler.queue_delay_s,
            }
            await self._publish()
            self.ready = True
            await self._announce_ready(budget.capacity_tokens)
            await self._keep_fresh()
            await self._drain(host)

    async def _join(self, cleanup: AsyncExitStack) -> None:
        config = self._config
        identity = Identity.load_or_create(config.identity) if config.identity else Identity.generate()
        notes = Notes(config.swarm)
        announce_host = config.announce_address and _split_address(config.announce_address, 0)[0]
        dht_port = config.dht_port or (_free_port(config.host) if announce_host else 0)

        async def join(initial_peers: list[str]) -> Dht:
            return await Dht.join(
                config.swarm,
                initial_peers,
                identity,
                host=config.host,
                port=dht_port,
                announce_host=announce_host,
            )

        with ExitStack() as held:
            # Another server may hold it for seconds: signals must be heard meanwhile.
            await asyncio.to_thread(held.enter_context, notes.locked())
            noted = notes.read()
            if config.initial_peers:
                self._dht = await join(list(config.initial_peers))
            else:
                self._dht = await join_noted(noted, notes, join)
            cleanup.push_async_callback(self._dht.shutdown)
            if noted and config.initial_peers:
                # Noting this one too would merge two swarms that only share a name.
                _logger.info("another swarm named %s runs here; use --swarm to keep them apart", config.swarm)
            else:
                notes.write(identity.peer_id, (await self._dht.addresses())[0])
                cleanup.callback(notes.remove, identity.peer_id)

    async def _choose_span(self, checkpoint: Checkpoint, num_blocks: int, device: torch.device) -> Span:
        view = await self._dht.view(checkpoint.name, num_blocks)
        block_bytes = hosted_bytes_per_block(checkpoint, self._config.quant)
        config = self._config
        if config.num_blocks is not None:
            if config.num_blocks > num_blocks:
                raise ValueError(f"{config.num_blocks} blocks are more than the model's {num_blocks}")
            return choose_span(view, num_blocks, config.num_blocks)
        share = _BLOCKS_OF_FREE if config.memory_bytes is None else _BLOCKS_OF_GIVEN
        affordable = int((config.memory_bytes or available_bytes(device)) * share // block_bytes)
        if affordable < 1:
            given = "free memory" if config.memory_bytes is None else f"memory in {config.memory_bytes >> 20} MiB"
            raise ValueError(
                f"not enough {given} for one block, which takes {block_bytes / 2**20:.1f} MiB beside keys and values"
            )
        return choose_span(view, num_blocks, affordable)

    def _current_record(self) -> ServerRecord:
        return dataclasses.replace(self._record, **self._measured())

    async def _publish(self) -> None:
        if not await self._dht.publish(self._current_record()):
            _logger.warning("the swarm did not take this server's record; trying again in %g s", REFRESH_S)

    async def _withdraw(self) -> None:
        self._record = dataclasses.replace(self._record, state=ServerState.OFFLINE)
        await self._publish()

    async def _keep_fresh(self) -> None:
        while not self._stop.is_set():
            try:
                await asyncio.wait_for(self._stop.wait(), REFRESH_S)
            except asyncio.TimeoutError:
                await self._publish()

    async def _drain(self, host: Host) -> None:
        """Lets generations end or move to other servers."""
        timeout_s = self._config.drain_timeout_s
        host.leaving = True
        self._record = dataclasses.replace(self._record, state=ServerState.DRAINING)
        if host.num_sessions:
            _logger.info(
                "leaving: waiting up to %g s for %d %s to end or move; told again to end, it leaves at once",
                timeout_s,
                host.num_sessions,
                "session" if host.num_sessions == 1 else "sessions",
            )
            publishing = asyncio.ensure_future(self._publish())
            await host.leave(timeout_s)
            await publishing

    async def _announce_ready(self, cache_tokens: int) -> None:
        config, record = self._config, self._record
        peer = (await self._dht.addresses())[0]
        swarm = "" if config.swarm == DEFAULT_SWARM else f" --swarm {config.swarm}"
        model = "" if config.model == ServerConfig.model else f" --model {config.model}"
        print(
            f"ready model={record.model} blocks={record.span} quant={record.quant} peer={peer} "
            f"grpc={record.addresses[0]}",
            flush=True,
        )
        _logger.info("measured %.0f tokens/s; room for %d tokens", record.tokens_per_s, cache_tokens)
        if ipaddress.ip_address(config.host).is_loopback:
            _logger.info("only this machine can join; to let others in, start servers with --host ADDRESS")
        else:
            _logger.info(
                "on the next machine: python -m swarm_server --host ADDRESS%s%s --initial-peers %s", model, swarm, peer
            )
        _logger.info('try it: python -m swarm_client generate%s%s "Return a list of"', model, swarm)


async def join_noted(noted: list[str], notes: Notes, join: Callable) -> Dht:
    """Joins through a noted server of this machine, forgetting notes that lead nowhere; founds the swarm otherwise."""
    while noted:
        try:
            return await join(noted)
        except NoSwarm:
            for address in noted:
                notes.discard(address)
            noted = []
    return await join([])


def _start_loading(cleanup: AsyncExitStack, *what: object) -> asyncio.Task[BlockStack]:
    """``_load`` in a thread; nobody waits for it if the server ends before."""
    loading = asyncio.ensure_future(asyncio.to_thread(_load, *what))
    cleanup.callback(loading.cancel)
    return loading


def _load(checkpoint: Checkpoint, span: Span, dtype: torch.dtype, device: torch.device, quant: str) -> BlockStack:
    report = Report(quant)
    with tqdm(total=len(span), desc="loading blocks", unit="block", file=sys.stderr, leave=False) as bar:

        def quantize(block: torch.nn.Module, index: int) -> None:
            nonlocal report
            report += quantize_(block, quant, device, dtype)

        stack = load_blocks(
            checkpoint, span, dtype=dtype, device=device, transform=quantize, progress=lambda _index: bar.update()
        )
    _logger.info("blocks %s loaded; %s", span, report)
    return stack


async def _share_cores(cores: CoreShare, scheduler: Scheduler) -> None:
    """Follows the number of servers on this machine with the number of threads that compute."""
    num_threads = None
    while True:
        if cores.threads() != num_threads:
            num_threads = cores.threads()
            # OpenMP keeps the number for each thread that asks it to compute.
            await scheduler.call(partial(torch.set_num_threads, num_threads))
            _logger.info("computing with %d %s", num_threads, "thread" if num_threads == 1 else "threads")
        await asyncio.sleep(_SHARE_CORES_S)


def _cache_budget(config: ServerConfig, engine: Engine, hosted_bytes: int) -> CacheBudget:
    token_bytes = engine.layout.token_bytes
    if config.cache_tokens is not None:
        return CacheBudget(config.cache_tokens * token_bytes, token_bytes)
    if config.cache_bytes is not None:
        size_bytes = config.cache_bytes
    elif config.memory_bytes is not None:
        size_bytes = config.memory_bytes - hosted_bytes
    else:
        size_bytes = default_cache_bytes(token_bytes, available_bytes(engine.device))
    if size_bytes < token_bytes:
        raise ValueError(f"cache memory of {size_bytes} bytes has no room for one token, which takes {token_bytes}")
    return CacheBudget(size_bytes, token_bytes)


def _max_step_tokens(config: ServerConfig, engine: Engine) -> int:
    if not engine.mixes_rows:
        return 1 << 31  # the prompt must come in one piece
    return config.chunk_tokens or (CHUNK_TOKENS_CPU if engine.device.type == "cpu" else CHUNK_TOKENS_CUDA)


def _ip_address(host: str) -> str:
    """libp2p listens on addresses only; raises ValueError for a name that does not resolve."""
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError):
        raise ValueError(f"host {host!r} is not known: expected an address of this machine") from None


def _bind(config: ServerConfig, certificate: Certificate) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        port = server.add_secure_port(f"{host}:{config.port}", certificate.server_credentials())
    except RuntimeError:
        port = 0
    if port == 0:
        raise ValueError(
            f"cannot listen on {host}:{config.port}: the port is in use or the address is not this machine's"
        )
    return server, port


def _split_address(address: str, default_port: int) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or address.endswith("]"):
        return address, default_port
    if not port.isdigit():
        raise ValueError(f"address {address!r} is not understood: expected HOST or HOST:PORT")
    return host, int(port)


def _announced(config: ServerConfig, port: int) -> str:
    if config.announce_address is not None:
        host, port = _split_address(config.announce_address, port)
        return f"{host}:{port}"
    if config.host in ("0.0.0.0", "::"):
        return f"{_lan_address()}:{port}"
    return f"{config.host}:{port}"


def _lan_address() -> str:
    """The address of the interface that leads outside; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: routed like any outside address
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _device_and_dtype(config: ServerConfig) -> tuple[torch.device, torch.dtype]:
    name = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    if config.dtype != "auto":
        return device, getattr(torch, config.dtype)
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32
