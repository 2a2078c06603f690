"""A checkpoint of what all stages have after one and the same step, written stage by stage.

No more than one stage is in memory, and the directory is there when all of it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from swarm_protocol.errors import PeerUnavailable, SwarmError
from swarm_stages.commands.building import build, stage_options, training_config
from swarm_stages.engine.export import export, export_adapter
from swarm_stages.engine.settings import StageSource
from swarm_training.checkpoints.whole_directory import whole_directory
from swarm_training.commands.building import build_tokenizer
from swarm_training.core.moment import Moment
from swarm_training.core.network import Network
from swarm_training.core.record import Progress
from swarm_training.run.state import TrainedState
from swarm_training.run.transfer import download, download_checkpoint
from swarm_training.runfile.settings import RunFile

Records = Callable[[], Sequence[Sequence[Progress]]]
_TRIES, _RETRY_S = 5, 1.0
_TRIES_AT_REST = 30  # if the run does not go on: some stages may still take the last step, or tell that they have


@dataclass(frozen=True)
class Source:
    """Who gives a stage's state of this digest. ``is_kept``: from a checkpoint, and not what it has now."""

    peer: Progress
    digest: bytes
    is_kept: bool


@dataclass(frozen=True)
class Plan:
    """From whom to get the stages, first to last, as they are after this moment."""

    moment: Moment
    sources: tuple[Source, ...]

    @property
    def is_kept(self) -> bool:
        return any(source.is_kept for source in self.sources)

    def is_of_now(self, newest: Moment) -> bool:
        """Whether the run, in which somebody is at ``newest``, is there: no checkpoint, nor peers that are behind."""
        behind = newest.step - self.moment.step
        return not self.is_kept and self.moment.rollbacks == newest.rollbacks and behind <= 1


async def collect(
    file: RunFile,
    source: StageSource,
    records: Records,
    network: Network,
    directory: Path,
    step: int | None = None,
) -> int:
    """Writes a checkpoint that transformers loads, or an adapter for PEFT, and its tokenizer; returns its step.

    Args:
        records: of the peers of each stage, as they are known now.
        directory: must not exist, or be empty.
        step: which one it must be; None: the newest that is to be had.

    Raises:
        PeerUnavailable: nobody gives some stage.
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
        # Records of a run that stands still may be old at first: what is older than the newest of them comes last, a
        # checkpoint as well as peers that were cut off.
        is_last = attempt >= (_TRIES_AT_REST if step is None and now == newest else _TRIES)
        all_plans = plans(stages, step)
        for plan in (each for each in all_plans if step is not None or is_last or (now and each.is_of_now(now))):

            def fetch(own: TrainedState, source: Source, moment: Moment = plan.moment) -> bytes:
                return asyncio.run_coroutine_threadsafe(_fetched(network, source, own, moment), loop).result()

            try:
                await asyncio.to_thread(write, file, source, plan, fetch, directory)
            except (SwarmError, TimeoutError):  # it is gone, or has gone on
                continue
            return plan.moment.step
        if not is_last:
            await asyncio.sleep(_RETRY_S)
            stages = records()
    if step is not None:
        raise PeerUnavailable(f"some stage has no state of step {step}: expected a run that ended there")
    raise PeerUnavailable(
        "the stages are at different steps, and have no checkpoint of one: expected a run that is stopped, or that has "
        "taken a few times checkpoint_every steps"
    )


def _newest(stages: Sequence[Sequence[Progress]]) -> Moment | None:
    """The last that any peer has come to."""
    return max((peer.moment for stage in stages for peer in stage), default=None)


def is_taken(directory: Path) -> bool:
    """Whether something is in it, or it is a file. Raises OSError if nobody may look."""
    return directory.exists() and (not directory.is_dir() or any(directory.iterdir()))


def require_new(directory: Path) -> None:
    """Raises ValueError if something is in it."""
    if is_taken(directory):
        raise ValueError(f"{directory} is not empty: expected a new directory")


def plans(stages: Sequence[Sequence[Progress]], step: int | None = None) -> list[Plan]:
    """The ways to get all stages of one step, newest first; what peers have now comes before checkpoints of it."""
    life = max((peer.rollbacks for stage in stages for peer in stage), default=0)
    now = [[(peer.moment, Source(peer, peer.state_digest, False)) for peer in stage] for stage in stages]
    kept = [
        [(Moment(life, peer.kept.step), Source(peer, peer.kept.state_digest, True)) for peer in stage if peer.kept]
        for stage in stages
    ]
    found = [plan for offers in (now, kept) for plan in _plans(offers) if step in (None, plan.moment.step)]
    return sorted(found, key=lambda plan: plan.moment, reverse=True)


def _plans(offers: Sequence[Iterable[tuple[Moment, Source]]]) -> list[Plan]:
    by_moment: list[dict[Moment, list[Source]]] = []
    for stage in offers:
        by_moment.append(defaultdict(list))
        for moment, source in stage:
            if source.peer.is_reachable:
                by_moment[-1][moment].append(source)
    common = set.intersection(*map(set, by_moment)) if by_moment else set()
    return [Plan(moment, tuple(_usual(stage[moment]) for stage in by_moment)) for moment in common]


def _usual(sources: Sequence[Source]) -> Source:
    """One of the majority."""
    counts = Counter(source.digest for source in sources)
    return max(sources, key=lambda source: (counts[source.digest], source.digest))


async def _fetched(network: Network, source: Source, own: TrainedState, moment: Moment) -> bytes:
    """Raises as ``download_checkpoint``; PeerUnavailable also if the peer has gone on."""
    if source.is_kept:
        return await download_checkpoint(network, source.peer, own, source.digest, asyncio.to_thread)
    downloaded = await download(network, source.peer, own, asyncio.to_thread)
    if downloaded.arrival.moment != moment:
        raise PeerUnavailable("the run has gone on", source.peer.peer_id)
    return downloaded.data


def write(
    file: RunFile,
    source: StageSource,
    plan: Plan,
    fetch: Callable[[TrainedState, Source], bytes],
    directory: Path,
) -> None:
    """In a thread, since it takes long."""

    def parts() -> Iterator[Mapping[str, Tensor]]:
        for index, giver in enumerate(plan.sources):
            built = build(file, source, index, training_config(file))
            built.state.load(plan.moment, fetch(built.state, giver))
            if built.state.digest() != giver.digest:
                raise PeerUnavailable("the peer has sent another state than its record says", giver.peer.peer_id)
            yield built.stage.state()

    lora = stage_options(file, "cpu").lora
    with whole_directory(directory) as partial_directory:
        if lora is not None:
            export_adapter(parts(), lora, partial_directory, file.model.name_or_path)
        else:
            export(parts(), source.config, partial_directory, layers=file.stages.layers)
            save_tokenizer(file, partial_directory)


def save_tokenizer(file: RunFile, directory: Path) -> None:
    """Raises OSError if it cannot be written."""
    tokenizer = build_tokenizer(file.model)
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from None  # tokenizers has no error of its own for that
