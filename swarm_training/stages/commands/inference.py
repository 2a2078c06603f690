"""The inference server that a stage's process becomes after the run's last step: it serves the stage's blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import CheckpointError, SwarmError
from swarm_protocol.file_lock import try_lock
from swarm_protocol.process.local_registry import checked_name
from swarm_protocol.process.routine import end_tasks
from swarm_server.core.config import ServerConfig
from swarm_server.node.server import Server
from swarm_training.checkpoints.whole_directory import refusals, require_writable
from swarm_training.core.callbacks import Say
from swarm_training.core.network import Network
from swarm_training.net.membership import listening_host
from swarm_training.runfile.settings import RunFile
from swarm_training.stages.commands.building import stage_source
from swarm_training.stages.commands.collecting import collect, is_taken
from swarm_training.stages.compress.layers import NONE
from swarm_training.stages.engine.building import build_stage
from swarm_training.stages.engine.stage import Stage
from swarm_training.stages.peer.watch import RunWatch, until_end

_LOOK_S = 0.2
_WRITE_AGAIN_S, _MOST_S = 10.0, 300.0  # each attempt fetches all stages again


@dataclass(frozen=True)
class Afterwards:
    """The plan for a stage's process after the run's last step."""

    # The path for the trained model, unless another process has written it. Its last part is the model's name, which is
    # thus the same on all machines and at clients. If the directory has anything else then, the model goes to a
    # directory of the same name in ``DIRECTORY-2``, beside it.
    directory: Path
    step: int  # the run's last step
    quant: str = ServerConfig.quant  # the quantisation of the blocks, see ``ServerConfig``


@dataclass(frozen=True)
class InferenceContext:
    """The context in which a stage's process serves its blocks."""

    stage: Stage  # the stage with the blocks to serve
    watch: RunWatch  # the watch of all stages, over ``network``
    network: Network
    # Multiaddrs of the process's DHT node; a process that joins the run by them finds the servers too.
    addresses: Sequence[str]
    # ``host``, ``announce_host``: see ``TrainingConfig``.
    host: str | None
    announce_host: str | None


def after_last_step(file: RunFile, directory: Path, step: int | None, quant: str) -> Afterwards:
    """Return the plan after the last step. ``step``: the last step, instead of the schedule's.

    Raises:
        ValueError: the run cannot be served, or never ends; or the directory has something else than a model.
        CannotWrite: the directory cannot be written.
    """
    last = file.optimizer.total_steps if step is None else step
    if not last:
        raise ValueError("the run has no last step: expected --steps, or total_steps under [optimizer]")
    if file.stages.lora_rank:
        raise ValueError("the run trains an adapter: expected servers of its base model that are given the adapter")
    if file.stages.layers != NONE:
        raise ValueError(
            f"layers between stages are {file.stages.layers}: expected {NONE}, since servers run stock models"
        )
    if file.tokens.organiser:
        raise ValueError("the run is private: expected servers of the swarm's own, since a token is for one process")
    ServerConfig(model=str(directory), quant=quant)
    checked_name(file.run.name)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file: expected a directory, or none yet")
    if not is_taken(directory):
        require_writable(directory.absolute())
    elif (reason := _no_model(directory)) is not None:
        raise ValueError(f"{directory} is not empty, and has no model: expected a new directory ({reason})")
    return Afterwards(directory.absolute(), last, quant)


def require_untaken(after: Afterwards, step: int) -> None:
    """Check that the directory is free before the last step. Raises ValueError if it has something already, which
    cannot be what the run will have trained."""
    if step < after.step and is_taken(after.directory):
        raise ValueError(
            f"{after.directory} is not empty, and the run is at step {step} of {after.step}: expected a new directory, "
            "to which the model is written after the last step"
        )


async def until_last_step(watch: RunWatch, planned: int) -> None:
    """Wait until all stages have taken the planned last step, or the run has ended before it."""
    ending = asyncio.ensure_future(until_end(watch))
    try:
        while not ending.done() and ((moment := watch.view().moment) is None or moment.step < planned):
            await asyncio.sleep(_LOOK_S)
    finally:
        await end_tasks([ending])


async def serve_trained(file: RunFile, after: Afterwards, place: InferenceContext, say: Say) -> None:
    """Serve the trained blocks after the last step, until cancelled; generations then end or move. Raise SwarmError or
    ValueError if the server cannot start, although the model has been written."""
    directory = await _written(file, after, place, say)
    config = ServerConfig(
        model=str(directory),
        blocks=place.stage.span,
        quant=after.quant,
        device=place.stage.options.device,
        host=listening_host(place.host, place.addresses),
        announce_address=place.announce_host,
        initial_peers=tuple(place.addresses),
        swarm=file.run.name,
    )
    await _run(Server(config))


async def _written(file: RunFile, after: Afterwards, place: InferenceContext, say: Say) -> Path:
    """Return the directory of the trained model, which this process or another one has written.

    Retry after any failure, because the trained weights are nowhere else than in memory.
    """
    retry_s, said = _WRITE_AGAIN_S, set[str]()

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    while True:
        try:
            return await _write_or_find(file, after, place, say_once)
        except (SwarmError, ValueError, OSError) as error:
            say_once(
                f"{error}: this process keeps its stage, and tries again; `swarm train export` can write elsewhere"
            )
        await asyncio.sleep(retry_s)
        retry_s = min(2 * retry_s, _MOST_S)


async def _write_or_find(file: RunFile, after: Afterwards, place: InferenceContext, say: Say) -> Path:
    """Return the model's directory; write it if needed. Raises CannotWrite, PeerUnavailable or as ``collect``."""
    for directory in _places(after.directory):
        async with _locked(directory):
            if not is_taken(directory):
                source = await asyncio.to_thread(stage_source, file)
                await collect(file, source, place.watch.all_records, place.network, directory, after.step)
                say(f"wrote {directory}: the run after step {after.step}")
                return directory
            if (reason := await asyncio.to_thread(_other_model, directory, place.stage)) is None:
                return directory
            say(f"{directory} {reason}: the model is written beside it")
    raise AssertionError("there is always another place")


def _places(directory: Path) -> Iterator[Path]:
    """Yield the paths where the model may be: the directory, and directories beside it that end in the model's name."""
    yield directory
    for number in count(2):
        yield directory.with_name(f"{directory.name}-{number}") / directory.name


async def _run(server: Server) -> None:
    running = asyncio.ensure_future(server.run())
    try:
        await asyncio.shield(running)  # after ``stop``, a server ends by itself, once its sessions have ended or moved
    except asyncio.CancelledError:
        server.stop()
        if not server.ready:
            running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        raise


def _no_model(directory: Path) -> str | None:
    """Return why the directory has no model; None if it has one."""
    try:
        ModelCheckpoint.open(directory)
    except (CheckpointError, ValueError) as error:
        return str(error)
    return None


def _other_model(directory: Path, stage: Stage) -> str | None:
    """Return what the directory has instead of the stage's weights, bit for bit; None if it has exactly these."""
    try:
        stored = build_stage(ModelCheckpoint.open(directory), stage.index, stage.num_stages, stage.options).state()
    except (CheckpointError, ValueError, OSError) as error:
        return f"has no model that was trained so ({error})"
    own = stage.state()
    is_same = stored.keys() == own.keys() and all(torch.equal(stored[name], own[name]) for name in own)
    return None if is_same else "has another model than the run"


@asynccontextmanager
async def _locked(directory: Path) -> AsyncIterator[None]:
    """Hold a lock that one process of this machine has at a time. Raises CannotWrite if there can be no lock."""
    with refusals(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = (directory.parent / f".{directory.name}.lock").open("w")
    with lock:
        while not try_lock(lock):
            await asyncio.sleep(_LOOK_S)
        yield
