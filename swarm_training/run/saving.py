"""The state of a run in a directory, from which the run goes on bit for bit when all of its peers have ended.

The state is one file, or if its model is known, a servable checkpoint: see ``checkpoints.checkpoint``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from swarm_protocol.errors import CheckpointError
from swarm_training.checkpoints import checkpoint
from swarm_training.checkpoints.checkpoint import Checkpoint
from swarm_training.checkpoints.model_files import ServableModel
from swarm_training.checkpoints.state_file import StateFile
from swarm_training.checkpoints.store import CheckpointDirectory
from swarm_training.core.moment import Moment
from swarm_training.core.record import Kept, Lineage
from swarm_training.rollback.kept import KeptCheckpoints, file_name, is_state, stored_in
from swarm_training.run.state import TrainedState, digest_of

_logger = logging.getLogger(__name__)


def save(
    state: TrainedState, went_back_to: int, directory: Path, keep: int, spared: Collection[int] = frozenset()
) -> Path:
    """Write the state to a new file in the directory; return its path. A process that is killed meanwhile leaves the
    files that were there. The newest ``keep`` files and those of the steps ``spared`` stay. Older files are removed,
    and so are files of steps that the run has undone by a rollback.

    Raises:
        ValueError: ``keep`` is less than 1, or the directory cannot be written.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: expected at least 1 checkpoint")
    moment, digest = state.moment, state.digest()
    kept = Kept(moment.step, digest, Lineage(moment.rollbacks, moment.rollbacks))
    checkpoints = KeptCheckpoints(1, keep, directory, stays=True)
    checkpoints.spare(spared)
    try:
        for path, other in stored_in(directory).items():
            # Written before the last rollback, at a step after the one to which it went back.
            if other.lineage.rollbacks < moment.rollbacks and other.step > went_back_to:
                path.unlink(missing_ok=True)
        checkpoints.adopt(moment.step, digest)
        checkpoints.keep_written(moment.step, digest, state.write, kept.lineage)
    except OSError as error:
        raise ValueError(f"cannot write a checkpoint to {directory}: {error.strerror or error}") from None
    return directory / file_name(kept)


def save_servable(
    content: Checkpoint,
    servable: ServableModel,
    went_back_to: int,
    directory: Path,
    keep: int,
    spared: Collection[int] = frozenset(),
) -> Path:
    """Write a servable checkpoint to a new folder in the directory; return its path. The rest is as for ``save``. Raise
    ValueError if ``keep`` is less than 1, or the directory cannot be written; CheckpointError if the directory has
    checkpoints of another run."""
    store = CheckpointDirectory(directory, keep)
    store.require_of(content.run)
    store.discard_undone_since(content.rollbacks, went_back_to)
    return store.write(content, servable, spared)


def load_newest(state: TrainedState, directory: Path) -> Moment | None:
    """Load the newest intact checkpoint of the directory, and return its moment; None if there is none. Each damaged
    one causes a warning. Raise CheckpointError if all checkpoints are damaged, or ValueError if the checkpoint is of
    another model or optimizer."""
    found: list[tuple[Moment, Path, Callable[[], None]]] = []
    for path, kept in stored_in(directory).items():
        moment = Moment(kept.lineage.rollbacks, kept.step)
        found.append((moment, path, partial(_load_file, state, moment, path, kept.state_digest)))
    store, damaged = CheckpointDirectory(directory), False
    for path in map(store.path, store.steps()):
        try:
            facts = checkpoint.read_facts(path)
        except CheckpointError as error:
            _logger.warning("%s; it is not used", error)
            damaged = True
            continue
        moment = Moment(facts["rollbacks"], facts["step"])
        found.append((moment, path, partial(_load_folder, state, moment, path)))
    for moment, path, load in sorted(found, key=lambda each: each[:2], reverse=True):
        try:
            load()
        except CheckpointError as error:  # which is a ValueError too
            _logger.warning("%s", error)
        except ValueError:
            raise ValueError(f"{path} is of another model or optimizer: expected another directory") from None
        else:
            return moment
    if found or damaged:
        raise CheckpointError(f"{directory} has no checkpoint that is intact: expected another one, to start over")
    return None


def _load_file(state: TrainedState, moment: Moment, path: Path, digest: bytes) -> None:
    try:
        data = StateFile.open(path)
        is_intact = is_state(data, digest, digest_of)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"the checkpoint {path} cannot be read, and is not used: {reason}") from None
    if not is_intact:
        raise CheckpointError(f"the checkpoint {path} is damaged, and is not used")
    state.load(moment, data)


def _load_folder(state: TrainedState, moment: Moment, path: Path) -> None:
    try:
        content = checkpoint.read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; it is not used") from None
    if not content.trained or not content.parameters.keys() >= set(content.trained):
        raise ValueError("the checkpoint does not say which of its parameters are trained")
    parameters = [content.parameters[name] for name in content.trained]
    state.restart(moment, parameters, content.optimizer, content.compressor)
