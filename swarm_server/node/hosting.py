"""The loading, measuring and serving of one span's blocks, until the span is closed."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.family import max_positions, sees
from swarm_models.checkpoints.files import HubModel, LocalFiles
from swarm_models.gpu.devices import best_device, default_dtype, named_device
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.quantization import Report, devices_of, quantize_, require_device
from swarm_models.quantization.split_linear import split_linears_
from swarm_protocol.process.logs import progress_bar
from swarm_protocol.span import Span
from swarm_server.adapters.store import AdapterStore
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.blocks.dense_linear import use_onednn_
from swarm_server.blocks.packed_layers import PackedLayers
from swarm_server.blocks.products import described
from swarm_server.blocks.split_stack import SplitStack, Stack
from swarm_server.blocks.weight_cache import WeightCache
from swarm_server.core.config import ServerConfig
from swarm_server.core.counters import Counters
from swarm_server.engine.engine import Engine
from swarm_server.engine.preloaded import load_adapters
from swarm_server.engine.scheduler import Scheduler
from swarm_server.engine.ways import can_join
from swarm_server.group.forming import GroupLeader
from swarm_server.group.links import GroupEnded
from swarm_server.group.members import LoadSpan, LocalGroup, MakeLoader, load_together
from swarm_server.group.remote import RemoteGroup
from swarm_server.kv.kv_cache import CacheBudget, default_cache_bytes
from swarm_server.kv.offload import KvOffload
from swarm_server.kv.prefix_cache import PrefixCache
from swarm_server.machine.cores import CoreShare
from swarm_server.machine.memory import available_bytes, hosted_bytes, tokens_with_scores
from swarm_server.metrics.throughput import Meter, SpeedCache, Speeds, hardware_name, measure
from swarm_server.net.neighbours import Neighbours
from swarm_server.net.validation import RequestValidator
from swarm_server.placement.device_split import split_span
from swarm_server.sessions.host import SessionManager
from swarm_server.sessions.services import SpanServices
from swarm_server.training.training_memory import TrainingMemory

_logger = logging.getLogger(__name__)
FollowerFiles = LocalFiles | HubModel  # of a model whose files the followers of a group read themselves
CHUNK_TOKENS_CPU, CHUNK_TOKENS_CUDA = 64, 512
_SHARE_CORES_S = 5.0
_WATCH_GROUP_S = 0.5
_QUIET_S = 5.0  # without sessions and work, before a group ends to form again with a member that has come


def devices_and_dtype(config: ServerConfig) -> tuple[tuple[torch.device, ...], torch.dtype]:
    """Return the devices of the blocks and the dtype of computation.

    Raises:
        ValueError: a device cannot be used, or does not support the quantisation.
    """
    auto = "cpu" if config.is_in_group else _best_device(config.quant)
    name = auto if config.device == "auto" else config.device
    devices = tuple(map(named_device, config.devices or (name,)))
    dtype = default_dtype(devices[0]) if config.dtype == "auto" else getattr(torch, config.dtype)
    for device in devices:
        require_device(config.quant, device)
        named_device(device, dtype)
    return devices, dtype


def _best_device(quant: str) -> str:
    """Return the best device. An accelerator without CUDA is left out, with a log line, if it cannot run ``quant``."""
    best = best_device()
    if best in ("cpu", "cuda", *devices_of(quant)):
        return best
    _logger.warning("%s is left out, because %s does not run there: --quant none does", best, quant)
    return "cpu"


def load_parts(
    config: ServerConfig,
    checkpoint: ModelCheckpoint,
    dtype: torch.dtype,
    parts: Sequence[tuple[Span, torch.device]],
    then: Callable[[torch.nn.Module], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[BlockStack], Report]:
    """Load and quantise the blocks of each device.

    ``then`` is called with each module once its linear layers are quantised, ``progress`` with the index of each block.
    """
    report, quant, cache = Report(config.quant), config.quant, WeightCache(config.weight_cache_bytes)
    int8_weight = KernelWeight if config.is_in_group else None  # others cannot be split between members
    layers = {device: PackedLayers(cache, quant, device, dtype, checkpoint.family, int8_weight) for _, device in parts}

    def prepare(device: torch.device, block: torch.nn.Module, index: int) -> None:
        nonlocal report
        eight_bits = layers[device].eight_bits(index)
        report += quantize_(block, quant, device, dtype, int8_weight=int8_weight, eight_bits=eight_bits)
        if device.type == "cpu":
            use_onednn_(block)
        if then is not None:
            then(block)

    stacks = [
        load_blocks(
            checkpoint,
            part,
            dtype=dtype,
            device=device,
            transform=partial(prepare, device),
            progress=progress,
            layers=layers[device],
        )
        for part, device in parts
    ]
    for kept in layers.values():
        report += kept.report
    return stacks, report


def follower_loader(config: ServerConfig, checkpoint: ModelCheckpoint) -> MakeLoader:
    """Return the function with which the followers of a group load the same blocks as this server.

    Raises:
        ValueError: other processes cannot read the model's files.
    """
    if not isinstance(checkpoint.files, FollowerFiles):
        raise ValueError(
            "the members of a group read the model's files themselves: expected a directory or a model of the hub, "
            "not one that comes from the swarm"
        )
    return partial(_follower_loader, config, checkpoint.files)


@contextmanager
def _follower_loader(config: ServerConfig, files: FollowerFiles) -> Iterator[LoadSpan]:
    devices, dtype = devices_and_dtype(config)
    checkpoint = ModelCheckpoint(files)
    with CoreShare() as cores:
        torch.set_num_threads(cores.threads())

        def load(span: Span, then: Callable[[torch.nn.Module], None]) -> None:
            span.within(checkpoint.family.num_blocks)
            torch.set_num_threads(cores.threads())
            load_parts(config, checkpoint, dtype, [(span, devices[0])], then)

        yield load


class SpanRuntime:
    """One span while the server hosts it."""

    def __init__(self, span: Span, host: SessionManager, meter: Meter, cores: CoreShare) -> None:
        self.span = span
        self.host = host
        self._meter = meter
        self._sharing = asyncio.ensure_future(_share_cores(cores, host.services.scheduler))

    @property
    def speeds(self) -> Speeds:
        """Return the speeds through the whole span: measured before serving at first, later measured in traffic."""
        return self._meter.speeds

    @property
    def cache_tokens(self) -> int:
        """Return the number of positions for which the KV cache has room in all."""
        return self.host.services.budget.capacity_tokens

    @property
    def cache_tokens_left(self) -> int:
        return self.host.services.budget.tokens_left

    @property
    def queue_delay_s(self) -> float:
        return self.host.services.scheduler.queue_delay_s

    async def close(self) -> None:
        """End the sessions that are left, and stop the compute thread."""
        self._sharing.cancel()
        await self.host.close()
        await asyncio.to_thread(self.host.services.scheduler.stop)


class SpanLoader:
    """The loader of one server's spans, one after the other, all of one model and with one configuration."""

    def __init__(
        self,
        config: ServerConfig,
        checkpoint: ModelCheckpoint,
        cores: CoreShare,
        devices: Sequence[torch.device],
        dtype: torch.dtype,
        counters: Counters,
        leader: GroupLeader | None = None,
    ) -> None:
        """Create the loader. ``leader``: the leader of a group on several machines, if there is one."""
        self._config = config
        self._leader = leader
        self._counters = counters
        self._checkpoint = checkpoint
        self._cores = cores
        self._devices = tuple(devices)
        self._dtype = dtype
        self._group: LocalGroup | RemoteGroup | None = None  # started with the first span
        self._closed = threading.Event()
        self._group_lock = threading.Lock()  # a group is formed once, and loads one span at a time
        products = described(config.quant, devices[0], dtype, is_in_group=config.is_in_group)
        stored = [] if config.kv_quant == "none" else [f"keys and values in {config.kv_quant}"]
        # Everything that the speed of a block depends on; see ``SpeedCache``.
        self._setting = [checkpoint.name, checkpoint.revision, products, *stored, str(dtype), hardware_name(devices)]
        self._prefetching: dict[Span, asyncio.Task[Stack]] = {}

    @property
    def members(self) -> int:
        """Return how many processes or devices compute each block together now; 1 before a group is formed."""
        if self._config.tensor_parallel:
            return len(self._devices)
        return 1 if self._group is None else self._group.links.members

    @property
    def _speed_cache(self) -> SpeedCache:
        """Return the cache of the speeds with the present members, of which there may be fewer than wanted."""
        group = [f"a group of {self.members}"] if self.members > 1 else []
        return SpeedCache([*self._setting, *group], self._cores)

    def known_speeds(self, num_blocks: int) -> Speeds | None:
        """Return the expected speeds of ``num_blocks`` blocks, or None if this machine has never measured them."""
        if self._config.throughput is not None:
            return Speeds(self._config.throughput, self._config.throughput)
        per_block = self._speed_cache.read()
        return None if per_block is None else per_block.through(num_blocks)

    def prefetch(self, span: Span) -> None:
        """Start to load a span in a thread, which continues even if nobody waits for it; ``load`` gets the result."""
        self._prefetching[span] = asyncio.ensure_future(asyncio.to_thread(self._load, span))

    async def load(self, span: Span) -> Stack:
        """Return the loaded blocks of a span. Raise what the loading raises."""
        if span not in self._prefetching:
            self.prefetch(span)
        return await self._prefetching.pop(span)

    def cancel(self) -> None:
        """Cancel the waiting for all prefetched spans."""
        for loading in self._prefetching.values():
            loading.cancel()

    def close(self) -> None:
        """End the followers of the group, if there is one."""
        self._closed.set()
        if self._group is not None:
            self._group.close()

    async def group_end(self, is_quiet: Callable[[], bool]) -> GroupEnded:
        """Wait until the group cannot go on, or could grow while the server ``is_quiet``; return the reason."""
        quiet_s, batches = 0.0, self._counters.batches
        while self._group is None or (failure := self._group.find_failure()) is None:
            await asyncio.sleep(_WATCH_GROUP_S)
            changes = self._group is not None and self._leader is not None and self._leader.should_form_again()
            has_worked, batches = self._counters.batches != batches, self._counters.batches
            quiet_s = quiet_s + _WATCH_GROUP_S if changes and is_quiet() and not has_worked else 0.0
            if quiet_s >= _QUIET_S:
                return GroupEnded("the group has another member or leader")
        return failure

    async def start(self, stack: Stack, neighbours: Neighbours, sharing: str) -> SpanRuntime:
        """Host a loaded span. For ``sharing``, see ``prefix_sharing``."""
        config, span = self._config, stack.span
        offload = await asyncio.to_thread(self._offload)
        prefix_cache = None if sharing == "none" else PrefixCache(between_owners=sharing == "all", offload=offload)
        engine = await asyncio.to_thread(Engine, stack, prefix_cache=prefix_cache, kv_quant=config.kv_quant)
        if engine.ways.graphs is None:
            _logger.info("decode steps are computed by the family's own code: %s", engine.ways.refusal)
        else:
            _logger.info("decode steps are %s", engine.ways.graphs.description)
        speeds = self.known_speeds(len(span))
        if speeds is None:
            speeds = await asyncio.to_thread(measure, engine, span)
            self._speed_cache.write(speeds.per_block(len(span)))
        budget = self._cache_budget(engine, span)
        meter = Meter(speeds, len(span), None if config.throughput else self._speed_cache.write)
        engine.report_to(meter, self._counters)
        chunk_tokens = self._chunk_tokens(engine, budget)
        validator = RequestValidator(
            self._checkpoint.name,
            self._checkpoint.revision,
            span,
            engine.hidden_size,
            max_positions(self._checkpoint.config),
            self._checkpoint.family.position_axes,
            max_step_tokens=chunk_tokens if engine.chunks_prompts else 1 << 31,  # else a prompt is one step
            joins=sees(self._checkpoint.whole_config) and await asyncio.to_thread(can_join, engine),
        )
        named = await asyncio.to_thread(load_adapters, config.adapters, self._checkpoint.family, engine, span)
        adapters = AdapterStore(config.adapter_bytes, named)
        evict: Callable[[], bool] = (lambda: False) if prefix_cache is None else prefix_cache.reclaim
        training = TrainingMemory(budget, engine.int8_weights, evict)
        budget.reclaim_by(lambda: training.reclaim() or evict())
        # Nothing may fail once the compute thread has started: it keeps the blocks in memory until it is stopped.
        scheduler = Scheduler(engine, config.queue_size, engine.mixes_rows, self._counters, chunk_tokens)
        services = SpanServices(
            engine, scheduler, budget, validator, neighbours, training, adapters, offload, counters=self._counters
        )
        return SpanRuntime(span, SessionManager(services, config.max_sessions), meter, self._cores)

    def _load(self, span: Span) -> Stack:
        self._offload().close()  # only to see that it works: blocks may take minutes to load, and this is needed then
        gc.collect()  # frees the blocks that were hosted before
        block_index, blocks = self._checkpoint.block_index, frozenset(span)
        self._checkpoint.stored(lambda name: block_index(name) in blocks)  # downloads all missing weights at once
        if self._config.tensor_parallel:
            return self._load_parts(span, partial(split_linears_, devices=self._devices, dtype=self._dtype))
        if self._config.group_size == 1:
            return self._load_parts(span)
        group = self._the_group()
        with self._group_lock:
            stack: Stack = load_together(group.links, span, self._load_parts)
        return stack

    def block_bytes_in(self, own_bytes: float) -> float:
        """Return how many bytes of blocks this server can hold in so much memory of this machine, with its group."""
        return own_bytes if self._config.group_size == 1 else self._the_group().block_bytes_in(own_bytes)

    def _the_group(self) -> LocalGroup | RemoteGroup:
        config, checkpoint = self._config, self._checkpoint
        with self._group_lock:
            if self._group is None:
                if self._leader is None:
                    self._group = LocalGroup(follower_loader(config, checkpoint), config.group_size)
                else:
                    self._group = self._leader.form(checkpoint, lambda: not self._closed.is_set())
        return self._group

    def _load_parts(self, span: Span, then: Callable[[torch.nn.Module], None] | None = None) -> Stack:
        """Load a span; ``then`` is called with each module whose linear layers have been packed."""
        with progress_bar(len(span), "loading blocks", unit="block") as bar:
            parts, report = load_parts(
                self._config, self._checkpoint, self._dtype, self._split(span), then, lambda _index: bar.update()
            )
        _logger.info("blocks %s loaded; %s", span, report)
        if len(parts) == 1:
            return parts[0]
        _logger.info("%s", ", ".join(f"blocks {part.span} are on {part.device}" for part in parts))
        return SplitStack(parts)

    def _split(self, span: Span) -> list[tuple[Span, torch.device]]:
        if self._config.tensor_parallel:
            return [(span, self._devices[0])]
        sizes = [self._checkpoint.block_parameters(index) for index in span]
        return list(zip(split_span(span, sizes, list(map(available_bytes, self._devices))), self._devices, strict=True))

    def _offload(self) -> KvOffload:
        config = self._config
        try:
            return KvOffload(config.kv_offload_memory_bytes, config.kv_offload_disk_bytes, config.kv_offload_directory)
        except OSError as error:
            raise ValueError(
                f"keys and values cannot be written to disk: {error}; --kv-offload-dir names another directory"
            ) from None

    def _cache_budget(self, engine: Engine, span: Span) -> CacheBudget:
        config, token_bytes = self._config, engine.layout.token_bytes
        if config.cache_tokens is not None:
            return CacheBudget(config.cache_tokens * token_bytes, token_bytes)
        if config.cache_bytes is not None:
            size_bytes = config.cache_bytes
        elif config.memory_bytes is not None:
            sizes_bytes = hosted_bytes(self._checkpoint, config.quant)
            own_share = 1.0 if self._group is None else self._group.own_share
            size_bytes = config.memory_bytes - int(own_share * sum(sizes_bytes[index] for index in span))
        else:  # devices have room until the first one is full
            by_device = engine.layout.token_bytes_by_device().items()
            free_bytes = min(self._free_bytes(device) * token_bytes // its_bytes for device, its_bytes in by_device)
            size_bytes = default_cache_bytes(token_bytes, free_bytes)
        if size_bytes < token_bytes:
            raise ValueError(f"cache memory of {size_bytes} bytes has no room for one token, which takes {token_bytes}")
        return CacheBudget(size_bytes, token_bytes)

    def _free_bytes(self, device: torch.device) -> int:
        """Return the free memory of a device, without what is set aside for keys and values outside the cache."""
        set_aside_bytes = self._config.kv_offload_memory_bytes if device.type == "cpu" else 0
        return max(0, available_bytes(device) - set_aside_bytes)

    def _chunk_tokens(self, engine: Engine, budget: CacheBudget) -> int:
        """Return how many tokens of prompts are computed at a time; fewer if their scores in an index are too large."""
        if self._config.chunk_tokens:
            return self._config.chunk_tokens
        chunk_tokens = CHUNK_TOKENS_CPU if engine.devices[0].type == "cpu" else CHUNK_TOKENS_CUDA
        if not engine.layout.has_index:
            return chunk_tokens
        config: Any = self._checkpoint.config
        longest = min(budget.capacity_tokens, max_positions(config) or budget.capacity_tokens)
        free_bytes = min(map(available_bytes, engine.devices))
        return min(chunk_tokens, tokens_with_scores(free_bytes, config.index_n_heads, longest))


async def _share_cores(cores: CoreShare, scheduler: Scheduler) -> None:
    """Adapt the number of compute threads to the number of servers on this machine, until cancelled."""
    num_threads = None
    while True:
        if cores.threads() != num_threads:
            num_threads = cores.threads()
            # OpenMP keeps this number for each calling thread, so the compute thread itself must set it.
            await scheduler.call(partial(torch.set_num_threads, num_threads))
            _logger.info("computing with %d %s", num_threads, "thread" if num_threads == 1 else "threads")
        await asyncio.sleep(_SHARE_CORES_S)
