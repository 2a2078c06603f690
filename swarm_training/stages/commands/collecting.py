"""The collection of a checkpoint from all stages after the same step, written stage by stage.

At most one stage is in memory at a time. The directory appears once all of the checkpoint is written.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from swarm_protocol.errors import PeerUnavailable, SwarmError
from swarm_protocol.failures import any_error_as
from swarm_training.checkpoints.state_file import StateFile
from swarm_training.checkpoints.whole_directory import whole_directory
from swarm_training.commands.building import build_tokenizer
from swarm_training.core.moment import Moment
from swarm_training.core.network import Network
from swarm_training.core.record import Progress
from swarm_training.run.state import TrainedState
from swarm_training.run.transfer.receiving import download, download_checkpoint
from swarm_training.runfile.settings import RunFile
from swarm_training.stages.commands.building import build, training_config
from swarm_training.stages.engine.export import export, export_adapter
from swarm_training.stages.engine.settings import StageSource

Records = Callable[[], Sequence[Sequence[Progress]]]
_TRIES, _RETRY_S = 5, 1.0
_TRIES_AT_REST = 30  # at rest, some stages may still take the last step, or report it


@dataclass(frozen=True)
class Source:
    """A peer that gives a stage's state of this digest. ``is_kept``: the state is a checkpoint, not the current one."""

    peer: Progress
    digest: bytes
    is_kept: bool


@dataclass(frozen=True)
class CollectionPlan:
    """A plan of the peers that give the stages, first to last, as the stages are after this moment."""

    moment: Moment
    sources: tuple[Source, ...]

    @property
    def is_kept(self) -> bool:
        return any(source.is_kept for source in self.sources)

    def is_of_now(self, newest: Moment) -> bool:
        """Return whether the plan has the current state: no checkpoint, and at most one step before ``newest``."""
        behind = newest.step - self.moment.step
        return not self.is_kept and self.moment.rollbacks == newest.rollbacks and behind <= 1


async def collect(
    file: RunFile,
    source: StageSource,
    records: Records,
    network: Network,
    directory: Path,
    step: int | None = None,
    averaged: bool = False,
    best: bool = False,
) -> int:
    """Write a checkpoint that transformers loads, with its tokenizer, or an adapter for PEFT; return its step.

    Args:
        records: a function that returns the records of each stage's peers, as they are known now.
        directory: the path to write to, which must not exist, or be empty.
        step: the step that the checkpoint must have; None: the newest that is available.
        averaged: whether the checkpoint has the moving average of the weights in place of the weights.
        best: whether it has the step with the lowest loss on held-out data.

    Raises:
        PeerUnavailable: no peer gives some stage.
        CannotWrite: the directory cannot be written.
        ValueError: the peers train another model, or the directory is not empty.
    """
    require_new(directory)
    loop = asyncio.get_running_loop()
    stages = records()
    newest, attempt, is_last = _newest(stages), 0, False
    while not is_last:
        attempt += 1
        now = _newest(stages)
        # Records of a run that stands still may be old at first. Hence the last attempt alone takes older states, such
        # as checkpoints, and the states of peers that were cut off.
        is_last = attempt >= (_TRIES_AT_REST if step is None and now == newest else _TRIES)
        all_plans, is_given = plans(stages, step, best), best or step is not None
        for plan in (each for each in all_plans if is_given or is_last or (now and each.is_of_now(now))):

            def fetch(own: TrainedState, source: Source, moment: Moment = plan.moment) -> StateFile:
                return asyncio.run_coroutine_threadsafe(_fetched(network, source, own, moment), loop).result()

            try:
                await asyncio.to_thread(write, file, source, plan, fetch, directory, averaged)
            except (SwarmError, TimeoutError):  # the peer is gone, or has gone on
                continue
            return plan.moment.step
        if not is_last:
            await asyncio.sleep(_RETRY_S)
            stages = records()
    raise PeerUnavailable(_why_none(step, best))


def _why_none(step: int | None, best: bool) -> str:
    if best:
        return "some stage does not keep the checkpoint with the lowest loss on held-out data so far"
    if step is not None:
        return f"some stage has no state of step {step}: expected a run that ended there"
    return (
        "the stages are at different steps, and have no checkpoint of one: expected a run that is stopped, or that has "
        "taken a few times checkpoint_every steps"
    )


def _newest(stages: Sequence[Sequence[Progress]]) -> Moment | None:
    """Return the latest moment that any peer has reached; None if there are no peers."""
    return max((peer.moment for stage in stages for peer in stage), default=None)


def is_taken(directory: Path) -> bool:
    """Return whether the directory contains something, or is a file. Raises OSError if it cannot be read."""
    return directory.exists() and (not directory.is_dir() or any(directory.iterdir()))


def require_new(directory: Path) -> None:
    """Check that a directory is new. Raises ValueError if it contains something."""
    if is_taken(directory):
        raise ValueError(f"{directory} is not empty: expected a new directory")


def plans(stages: Sequence[Sequence[Progress]], step: int | None = None, best: bool = False) -> list[CollectionPlan]:
    """Return the plans for all stages of one step, newest first; current states come before checkpoints of it.
    ``best``: the step is that with the lowest loss on held-out data."""
    # Checkpoints that peers show are of the run since its last rollback, since they discard what a rollback undoes.
    life = max((peer.rollbacks for stage in stages for peer in stage), default=0)
    now = [[(peer.moment, Source(peer, peer.state_digest, False)) for peer in stage] for stage in stages]
    stored = [
        [
            (Moment(life, kept.step), Source(peer, kept.state_digest, True))
            for peer in stage
            if (kept := peer.best if best else peer.kept) is not None
        ]
        for stage in stages
    ]
    offered = (stored,) if best else (now, stored)
    found = [plan for offers in offered for plan in _plans(offers) if step in (None, plan.moment.step)]
    return sorted(found, key=lambda plan: plan.moment, reverse=True)


def _plans(offers: Sequence[Iterable[tuple[Moment, Source]]]) -> list[CollectionPlan]:
    by_moment: list[dict[Moment, list[Source]]] = []
    for stage in offers:
        by_moment.append(defaultdict(list))
        for moment, source in stage:
            if source.peer.is_reachable:
                by_moment[-1][moment].append(source)
    common = set.intersection(*map(set, by_moment)) if by_moment else set()
    return [CollectionPlan(moment, tuple(_usual(stage[moment]) for stage in by_moment)) for moment in common]


def _usual(sources: Sequence[Source]) -> Source:
    """Return a source with the most frequent digest."""
    counts = Counter(source.digest for source in sources)
    return max(sources, key=lambda source: (counts[source.digest], source.digest))


async def _fetched(network: Network, source: Source, own: TrainedState, moment: Moment) -> StateFile:
    """Return a stage's state. Raises as ``download_checkpoint``; PeerUnavailable also if the peer has gone on."""
    if source.is_kept:
        return await download_checkpoint(network, source.peer, own, source.digest, asyncio.to_thread)
    downloaded = await download(network, source.peer, own, asyncio.to_thread)
    if downloaded.arrival.moment != moment:
        raise PeerUnavailable("the run has gone on", source.peer.peer_id)
    return downloaded.data


def write(
    file: RunFile,
    source: StageSource,
    plan: CollectionPlan,
    fetch: Callable[[TrainedState, Source], StateFile],
    directory: Path,
    averaged: bool = False,
) -> None:
    """Write a plan's checkpoint or adapter; ``averaged``: as for ``collect``. Call it in a thread, since it takes
    long."""

    def parts() -> Iterator[Mapping[str, Tensor]]:
        for index, giver in enumerate(plan.sources):
            built = build(file, source, index, training_config(file))
            built.state.load(plan.moment, fetch(built.state, giver))
            if built.state.digest() != giver.digest:
                raise PeerUnavailable("the peer has sent another state than its record says", giver.peer.peer_id)
            with built.state.averaged() if averaged else nullcontext():
                yield built.stage.state()

    with whole_directory(directory) as partial_directory:
        if rank := file.stages.lora_rank:
            export_adapter(parts(), rank, partial_directory, file.model.name_or_path)
        else:
            export(parts(), source.config, partial_directory, layers=file.stages.layers)
            save_tokenizer(file, partial_directory)


def save_tokenizer(file: RunFile, directory: Path) -> None:
    """Save the run's tokenizer. Raises OSError if it cannot be written."""
    tokenizer = build_tokenizer(file.model)
    # The library of tokenizers has no error class of its own for a failed write.
    with any_error_as(lambda error: OSError(str(error)) if type(error) is Exception else error):
        tokenizer.save_pretrained(directory)
