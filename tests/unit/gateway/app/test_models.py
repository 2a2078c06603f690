"""Which models of a swarm are offered, and how often one is loaded."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, GenerationConfig, LlamaConfig

from swarm_client.core.config import ClientConfig
from swarm_gateway.limits.admission import ApiError
from swarm_gateway.monitor.model_monitor import ModelStatus, ServerStatus
from swarm_gateway.monitor.monitor import SwarmSnapshot
from swarm_gateway.web.models import SwarmModels, Traits
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_protocol.errors import NoRoute, NoSwarm
from tests.unit.support import run, server_record


def status(model: str, *servers: tuple[str, tuple[str, ...]], revision: str = "revision") -> ModelStatus:
    """``servers``: the blocks and adapters of each."""
    records = [
        server_record(f"peer{number}", blocks, model=model, adapters=adapters)
        for number, (blocks, adapters) in enumerate(servers)
    ]
    return ModelStatus(model, 8, tuple(map(ServerStatus, records)), revision)


class Loads:
    """Stands for ``DistributedModel``, and makes batchers.

    Attributes:
        asked: location, revision and adapter of each.
        fail: what they fail with.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, str]] = []
        self.closed: list[str] = []
        self.fail: list[Exception] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def load(self, location: str, *, config: ClientConfig, revision: str | None) -> Any:
        self.asked.append((location, revision, config.adapter))
        assert self.go_on.wait(30)
        if self.fail:
            raise self.fail.pop()
        return SimpleNamespace(
            close=lambda: self.closed.append("model"),
            blocks=SimpleNamespace(max_positions=64),
            generation_config=GenerationConfig(),
            config=LlamaConfig(vocab_size=100),
        )

    def make_batcher(self, _model: Any) -> Any:
        return SimpleNamespace(submit=None, close=lambda: self.closed.append("batcher"))


EMPTY = SwarmSnapshot(())


class Monitor:
    """Stands for the swarm; it sees this, or fails with it."""

    def __init__(self, seen: SwarmSnapshot | Exception) -> None:
        self._seen = seen

    async def look(self) -> SwarmSnapshot:
        if isinstance(self._seen, Exception):
            raise self._seen
        return self._seen

    async def close(self) -> None: ...


@pytest.fixture
def loads() -> Loads:
    return Loads()


def swarm_models(loads: Loads, seen: SwarmSnapshot | Exception = EMPTY) -> SwarmModels:
    monitor: Any = Monitor(seen)
    return SwarmModels(ClientConfig(), DEFAULT_MODEL, None, loads.make_batcher, load=loads.load, monitor=monitor)


def test_models_with_all_their_blocks_are_offered_with_their_adapters(loads: Loads) -> None:
    seen = (
        status(DEFAULT_MODEL, ("0:4", ("legal", "half")), ("4:8", ("legal",))),
        status("org/whole", ("0:8", ())),
        status("org/part", ("0:4", ())),
        status("../../etc", ("0:8", ())),
    )
    models = swarm_models(loads, SwarmSnapshot(seen))
    assert run(models.names()) == [DEFAULT_MODEL, f"{DEFAULT_MODEL}:legal", "org/whole"]
    run(models.get(f"{DEFAULT_MODEL}:legal"))
    assert loads.asked == [(DEFAULT_MODEL, None, "legal")]
    for name in ("org/part", "../../etc", f"{DEFAULT_MODEL}:half"):
        with pytest.raises(ApiError):
            run(models.get(name))


def test_a_file_that_servers_announce_is_loaded_without_its_fingerprint(
    loads: Loads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr("swarm_gateway.web.models.tokenizer_at", lambda *_: None)
    models = swarm_models(loads, SwarmSnapshot((status("model.gguf", ("0:8", ())),)))
    run(models.get("model.gguf"))
    assert loads.asked == [("model.gguf", None, "")]


def test_the_chosen_model_is_offered_without_a_swarm(loads: Loads) -> None:
    models = swarm_models(loads, NoSwarm("nobody answers"))
    assert run(models.names()) == [DEFAULT_MODEL]
    with pytest.raises(ApiError) as missing:
        run(models.get("other"))
    assert missing.value.status == 404


async def test_the_traits_of_a_model_are_known_before_it_is_loaded(loads: Loads) -> None:
    models = swarm_models(loads, SwarmSnapshot((status("org/none", ("0:8", ("legal",))),)))
    await models.names()
    positions = AutoConfig.from_pretrained(locate(DEFAULT_MODEL)).max_position_embeddings
    known = Traits(has_template=False, capabilities=("completion", "embedding"), max_positions=positions)
    assert await models.traits(DEFAULT_MODEL, wait=False) == known
    assert await models.traits("org/none:legal", wait=False) is None
    assert await models.traits("org/none:legal") is None  # it has no tokenizer here
    assert await models.traits("org/gone") is None  # its servers may leave while a request lists the models
    assert loads.asked == []


async def test_who_asks_at_the_same_time_waits_for_one_load(loads: Loads) -> None:
    models = swarm_models(loads)
    loads.go_on.clear()
    first, second, gone = (asyncio.create_task(models.get(DEFAULT_MODEL)) for _ in range(3))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    loads.go_on.set()
    assert await first is await second is await models.get(DEFAULT_MODEL)
    assert loads.asked == [(DEFAULT_MODEL, None, "")]
    models.close()
    assert loads.closed == ["batcher", "model"]


async def test_a_failure_is_forgotten(loads: Loads) -> None:
    models = swarm_models(loads)
    loads.fail = [NoRoute("no server")]
    with pytest.raises(NoRoute):
        await models.get(DEFAULT_MODEL)
    assert (await models.get(DEFAULT_MODEL)).max_positions == 64
    assert len(loads.asked) == 2
