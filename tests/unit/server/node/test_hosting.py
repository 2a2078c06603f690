"""A span over several devices is loaded in parts, and hosted as one."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.kernels.quantized_linear import QuantizedLinear
from swarm_models.quantization.split_linear import SplitLinear
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks
from swarm_server.blocks.split_stack import SplitStack
from swarm_server.core.config import ServerConfig
from swarm_server.core.counters import Counters
from swarm_server.engine.engine import Engine
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.machine.cores import CoreShare
from swarm_server.metrics.throughput import Speeds
from swarm_server.node import hosting
from swarm_server.node.hosting import SpanLoader, devices_and_dtype, load_parts
from tests.simulated_devices import FIRST, SECOND, SimulatedDevices
from tests.worlds.virtual_time import run_virtually
from tests.zoo import save_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_span_on_two_devices(quant: str, tmp_path: Path, caplog) -> None:
    save_checkpoint("llama", tmp_path)
    config = ServerConfig(model=str(tmp_path), quant=quant, throughput=5.0)

    async def scenario() -> None:
        with CoreShare() as cores:
            checkpoint = ModelCheckpoint.open(tmp_path)
            loader = SpanLoader(config, checkpoint, cores, (CPU, CPU), torch.float32, Counters())
            stack = await loader.load(Span(1, 5))
            assert isinstance(stack, SplitStack) and stack.cuts == (3,) and stack.span == Span(1, 5)
            runtime = await loader.start(stack, None, "none")
            assert runtime.span == Span(1, 5) and runtime.cache_tokens >= 1024
            await runtime.close()

    with caplog.at_level(logging.INFO, "swarm_server.node.hosting"):
        asyncio.run(scenario())
    assert "blocks 1:3 are on cpu, blocks 3:5 are on cpu" in caplog.text
    assert "blocks 1:5 loaded" in caplog.text


def test_blocks_that_cannot_be_served_leave_no_thread_that_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError("the adapter is gone")

    async def scenario() -> None:
        with CoreShare() as cores:
            config, checkpoint = ServerConfig(model=str(tmp_path), throughput=5.0), ModelCheckpoint.open(tmp_path)
            loader = SpanLoader(config, checkpoint, cores, (CPU,), torch.float32, Counters())
            with pytest.raises(OSError, match="the adapter is gone"):
                await loader.start(await loader.load(Span(0, 1)), None, "none")

    save_checkpoint("llama", tmp_path)
    monkeypatch.setattr(hosting, "load_adapters", fail)
    before = set(threading.enumerate())
    asyncio.run(scenario())
    assert [thread.name for thread in set(threading.enumerate()) - before if thread.name == "compute"] == []


@pytest.mark.parametrize(
    ("name", "chunk_tokens", "expected"), [("deepseek_v32", None, 5), ("deepseek_v32", 7, 7), ("llama", None, 64)]
)
def test_prompts_are_cut_so_that_the_scores_of_an_index_fit(
    name: str, chunk_tokens: int | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(name, tmp_path)
    checkpoint = ModelCheckpoint.open(tmp_path)
    engine = Engine(load_blocks(checkpoint, Span(0, 1)))
    heads = getattr(checkpoint.config, "index_n_heads", 1)
    monkeypatch.setattr(hosting, "available_bytes", lambda _device: 5 * 5.5 * 8 * heads * 40)  # a fifth is for scores
    budget = CacheBudget(40 * engine.layout.token_bytes, engine.layout.token_bytes)
    with CoreShare() as cores:
        config = ServerConfig(model=str(tmp_path), chunk_tokens=chunk_tokens)
        loader = SpanLoader(config, checkpoint, cores, (CPU,), torch.float32, Counters())
        assert loader._chunk_tokens(engine, budget) == expected


def test_a_directory_that_keys_and_values_cannot_be_written_to_is_found_before_blocks_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint("llama", tmp_path)
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / "inside"
    config = ServerConfig(model=str(tmp_path), kv_offload_disk_bytes=1 << 20, kv_offload_directory=directory)
    monkeypatch.setattr(hosting, "load_parts", lambda *_arguments: pytest.fail("the blocks are loaded"))
    with CoreShare() as cores:
        loader = SpanLoader(config, ModelCheckpoint.open(tmp_path), cores, (CPU,), torch.float32, Counters())
        with pytest.raises(ValueError, match="--kv-offload-dir names another directory"):
            asyncio.run(loader.load(Span(0, 1)))


def test_all_blocks_on_two_devices_that_share_their_rows(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, hidden_size=128, num_key_value_heads=4, intermediate_size=320)
    devices = ("cuda:0", "cuda:1")
    config = ServerConfig(model=str(tmp_path), quant="none", devices=devices, tensor_parallel=True, num_blocks=1)
    with CoreShare() as cores, SimulatedDevices():
        checkpoint = ModelCheckpoint.open(tmp_path)
        loader = SpanLoader(config, checkpoint, cores, (FIRST, SECOND), torch.float32, Counters())
        assert loader.members == 2
        stack = loader._load(Span(1, 2))  # in this thread, where the devices are simulated
        split = [module for module in stack.modules() if isinstance(module, SplitLinear)]
        assert stack.devices == (FIRST,) and len(split) == 7
        assert all([part.weight.device for part in module.parts] == [FIRST, SECOND] for module in split)


def test_speeds_are_kept_for_the_present_number_of_members(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_checkpoint("llama", tmp_path)
    config = ServerConfig(model=str(tmp_path), group_size=3)
    with CoreShare() as cores:
        loader = SpanLoader(config, ModelCheckpoint.open(tmp_path), cores, (CPU,), torch.float32, Counters())
        for members in (1, 2, 3):  # alone at first, then with one follower, then with both
            loader._group = None if members == 1 else SimpleNamespace(links=SimpleNamespace(members=members))
            assert loader.known_speeds(1) is None
            loader._speed_cache.write(Speeds(10.0 * members, 100.0))
        loader._group = SimpleNamespace(links=SimpleNamespace(members=2))
        assert loader.known_speeds(1) == Speeds(20.0, 100.0)


def test_a_group_forms_again_once_there_has_been_no_work_for_a_while(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    counters = Counters()

    async def scenario(cores: CoreShare) -> float:
        config, checkpoint = ServerConfig(model=str(tmp_path), group_size=3), ModelCheckpoint.open(tmp_path)
        loader = SpanLoader(config, checkpoint, cores, (CPU,), torch.float32, counters)
        loader._group = SimpleNamespace(find_failure=lambda: None)
        loader._leader = SimpleNamespace(should_form_again=lambda: True)
        ending = asyncio.ensure_future(loader.group_end(lambda: True))
        for _ in range(3):  # a training step every 4.2 seconds, too short to be seen while it is computed
            await asyncio.sleep(4.2)
            assert not ending.done()
            counters.finish("training", 0.01)
        await ending
        return asyncio.get_running_loop().time()

    with CoreShare() as cores:
        assert 12.6 + 5 <= run_virtually(scenario(cores)) <= 12.6 + 6


@pytest.mark.skipif(not KernelWeight.is_available(), reason="no compiled kernel")
def test_members_of_a_group_have_weights_that_can_be_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelWeight, "is_fastest", lambda: False)
    save_checkpoint("mixtral", tmp_path)
    config = ServerConfig(model=str(tmp_path), quant="int8", group_size=2, weight_cache_bytes=0)
    (stack,), _report = load_parts(config, ModelCheckpoint.open(tmp_path), torch.float32, [(Span(0, 1), CPU)])
    layers = [module for module in stack.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 4 + 2 * 4 and all(isinstance(layer.quantized, KernelWeight) for layer in layers)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="device 'cuda:99' cannot be used: "):
        devices_and_dtype(ServerConfig(devices=("cuda:99", "cuda:98")))
    assert devices_and_dtype(ServerConfig(device="cpu")) == ((CPU,), torch.float32)
