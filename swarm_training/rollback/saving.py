"""The state of a run in a directory, from which the run goes on bit for bit when all of its peers have ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from swarm_protocol.errors import CheckpointError
from swarm_training.core.moment import Moment
from swarm_training.core.record import Kept, Lineage
from swarm_training.rollback.kept import KeptCheckpoints, file_name, is_state, stored_in

_logger = logging.getLogger(__name__)


class SavedState(Protocol):
    """The interface of a state that is saved and loaded: a ``TrainedState``."""

    moment: Moment

    def digest(self) -> bytes: ...

    def write(self, file: BinaryIO) -> None: ...

    def load(self, moment: Moment, data: bytes) -> None: ...


def save(state: SavedState, went_back_to: int, directory: Path, keep: int) -> Path:
    """Write the state to a new file in the directory; return its path. A process that is killed meanwhile leaves the
    files that were there. All but the newest ``keep`` files are removed, and those of steps that the run has undone.

    Raises:
        ValueError: ``keep`` is less than 1, or the directory cannot be written.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: expected at least 1 checkpoint")
    moment, digest = state.moment, state.digest()
    kept = Kept(moment.step, digest, Lineage(moment.rollbacks, moment.rollbacks))
    checkpoints = KeptCheckpoints(1, keep, directory, stays=True)
    try:
        for path, other in stored_in(directory).items():
            if other.lineage.rollbacks < moment.rollbacks and other.step > went_back_to:
                path.unlink(missing_ok=True)
        checkpoints.adopt(moment.step, digest)
        checkpoints.keep_written(moment.step, digest, state.write, kept.lineage)
    except OSError as error:
        raise ValueError(f"cannot write a checkpoint to {directory}: {error.strerror}") from None
    return directory / file_name(kept)


def load_newest(state: SavedState, directory: Path, digest_of: Callable[[bytes], bytes]) -> Moment | None:
    """Load the newest file of the directory that is intact, and return its moment; None if there are no files. Damaged
    ones cause a warning. ``digest_of``: see ``KeptCheckpoints``.

    Raises:
        CheckpointError: all files are damaged.
        ValueError: the file is of another model or optimizer.
    """
    files = stored_in(directory)
    for path in sorted(files, key=lambda each: (files[each].lineage.rollbacks, files[each].step), reverse=True):
        kept = files[path]
        try:
            data = path.read_bytes()
        except OSError as error:
            _logger.warning("the checkpoint %s cannot be read, and is not used: %s", path, error.strerror)
            continue
        if not is_state(data, kept.state_digest, digest_of):
            _logger.warning("the checkpoint %s is damaged, and is not used", path)
            continue
        moment = Moment(kept.lineage.rollbacks, kept.step)
        try:
            state.load(moment, data)
        except ValueError:
            raise ValueError(f"{path} is of another model or optimizer: expected another directory") from None
        return moment
    if files:
        raise CheckpointError(f"{directory} has no checkpoint that is intact: expected another one, to start over")
    return None
