"""The checkpoints of a run: the newest few in a directory, and a copy of each on the hub if that is wanted."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path
from typing import Any

from swarm_protocol.errors import CheckpointError
from swarm_protocol.failures import any_error_as, first_line
from swarm_protocol.wire.printable import printable
from swarm_training.checkpoints import checkpoint
from swarm_training.checkpoints.checkpoint import AVERAGED, TRAINING, Checkpoint
from swarm_training.checkpoints.model_files import ServableModel
from swarm_training.checkpoints.whole_directory import PREFIX, refusals
from swarm_training.core.moment import Moment
from swarm_training.losses.curve import LossCurve

_LONG_AGO_S = 3600.0  # longer than any checkpoint takes to write
_logger = logging.getLogger(__name__)


class CheckpointDirectory:
    """A directory with ``step-000000120`` and so on. A process killed while writing leaves older ones intact."""

    def __init__(self, directory: Path, keep: int = 3) -> None:
        """Use ``directory``, which need not exist. ``keep``: the number of newest checkpoints that stay."""
        if keep < 1:
            raise ValueError(f"keep is {keep}: expected at least 1 checkpoint")
        self.directory = directory
        self._keep = keep

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:09d}"

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that are there, ascending."""
        names = [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d{9,16})", name)))

    def write(self, content: Checkpoint, servable: ServableModel | None = None, spared: Collection[int] = ()) -> Path:
        """Write a checkpoint, unless it is there already. Return its path. Raise ValueError if writing fails.

        ``servable``: the model of transformers whose files the checkpoint has; None: it has the parameters alone.
        ``spared``: steps whose checkpoints stay beside the newest ones."""
        path = self.path(content.step)
        if not path.exists():
            checkpoint.write(content, path, servable)
        for step in set(self.steps()[: -self._keep]) - set(spared):
            shutil.rmtree(self.path(step), ignore_errors=True)
        for partial in self.directory.glob(f"{PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):
                if partial.stat().st_mtime < time.time() - _LONG_AGO_S:  # its process was killed
                    shutil.rmtree(partial, ignore_errors=True)
        return path

    def read(self, step: int) -> Checkpoint:
        """Read the checkpoint of a step. Raise CheckpointError if there is none, or it is damaged."""
        if not self.path(step).is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}: there are those of {there}")
        return checkpoint.read(self.path(step))

    def newest(self, say: Callable[[str], object] = _logger.warning) -> Checkpoint | None:
        """Return the newest checkpoint that is intact; None if there are no checkpoints.

        Newer, damaged checkpoints are renamed to ``damaged-…``; ``say`` is called with a warning for each.

        Raises:
            CheckpointError: all checkpoints are damaged; none is renamed then.
            CannotWrite: a damaged checkpoint cannot be renamed.
        """
        damaged: dict[int, CheckpointError] = {}
        for step in reversed(self.steps()):
            try:
                content = self.read(step)
            except CheckpointError as error:
                damaged[step] = error
                continue
            for later, reason in damaged.items():
                say(f"warning: {reason}; {self._set_aside(later)} is not used")
            return content
        if damaged:
            raise CheckpointError(
                f"{self.directory} has no checkpoint that is intact: {next(iter(damaged.values()))}; expected another "
                "directory, to start over"
            )
        return None

    def _set_aside(self, step: int, why: str = "damaged") -> Path:
        """Rename a checkpoint that is damaged, or is not used for another reason; return its new path. Raise
        CannotWrite if that fails."""
        path = self.path(step)
        free = (path.with_name(f"{why}-{number}-{path.name}") for number in count(1))
        with refusals(path):
            return path.rename(next(each for each in free if not each.exists()))

    def require_of(self, run: str) -> None:
        """Raise CheckpointError if there are checkpoints of another run."""
        for step in self.steps():
            other = self._facts(step).get("run", run)
            if other != run:
                raise CheckpointError(
                    f"{self.directory} has checkpoints of run {printable(other, 60)!r}: expected another directory for "
                    f"those of {run!r}"
                )

    def discard_undone(self, rollbacks: int, went_back_to: int, spared: Moment | None = None) -> None:
        """Discard checkpoints that rollbacks may have undone while nobody wrote here. The run has had ``rollbacks``
        rollbacks, the last one to step ``went_back_to``. The checkpoint of the moment ``spared`` stays. Damaged ones
        are renamed. Raise CannotWrite if this fails."""
        for step in self.steps():
            written = self._facts(step).get("rollbacks")
            if written is None:
                self._set_aside(step)
            elif spared == Moment(written, step):
                continue
            # Of earlier rollbacks than the last one, nobody here knows to which step they went.
            elif written != rollbacks and not (written == rollbacks - 1 and step <= went_back_to):
                self._discard(step)

    def discard_undone_since(self, rollbacks: int, went_back_to: int) -> None:
        """Discard the checkpoints of steps that the last rollback has undone, in a process that has seen this rollback
        and all earlier ones. ``rollbacks``, ``went_back_to``: as in ``discard_undone``. Raise CannotWrite if this
        fails."""
        for step in self.steps():
            if step > went_back_to and self._facts(step).get("rollbacks", rollbacks) < rollbacks:
                self._discard(step)

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps to ``unused-…``, because the run goes on without them. Return their new
        paths. Raise CannotWrite if this fails."""
        return [self._set_aside(later, "unused") for later in self.steps() if later > step]

    def data_at(self, step: int) -> dict[str, Any]:
        """Return where the data went on at the checkpoint of this step, or else at the newest checkpoint; an empty dict
        if there is no checkpoint."""
        steps = self.steps()
        data: dict[str, Any] = self._facts(step if step in steps else steps[-1]).get("data", {}) if steps else {}
        return data

    def losses(self) -> LossCurve:
        """Return the losses in the newest checkpoint that has any; an empty curve if none has."""
        curves = (checkpoint.read_losses(self.path(step)) for step in reversed(self.steps()))
        return next((curve for curve in curves if curve is not None), LossCurve())

    def _facts(self, step: int) -> dict[str, Any]:
        """Return the checkpoint's facts, see ``read_facts``; an empty dict if the checkpoint is damaged."""
        try:
            return checkpoint.read_facts(self.path(step))
        except CheckpointError:
            return {}

    def discard_after(self, step: int) -> None:
        """Discard the checkpoints of later steps, which a rollback has undone. Raise CannotWrite if this fails."""
        for later in self.steps():
            if later > step:
                self._discard(later)

    def _discard(self, step: int) -> None:
        with refusals(self.path(step)):
            shutil.rmtree(self.path(step))


def copy_to_hub(repository: str, directory: Path, content: Checkpoint) -> None:
    """Copy a checkpoint to the repository, in a commit that replaces the last checkpoint there. Raise CheckpointError
    if the hub does not take it."""

    def failure(error: Exception) -> CheckpointError:
        what = f"the checkpoint of step {content.step} was not copied to {repository} on the hub"
        return CheckpointError(f"{what}: {first_line(error)}")

    with any_error_as(failure):  # huggingface_hub raises the errors of whichever HTTP library it uses
        upload_to_hub(directory, repository, f"{content.run}: step {content.step}")


def upload_to_hub(directory: Path, repository: str, message: str) -> None:
    """Upload all files in one commit, so that a download gets a whole checkpoint. Files of earlier checkpoints in the
    folders ``training`` and ``averaged`` are deleted, because this checkpoint may lack these folders."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, exist_ok=True)
    earlier = [f"{folder}/*" for folder in (AVERAGED, TRAINING)]
    api.upload_folder(repo_id=repository, folder_path=directory, commit_message=message, delete_patterns=earlier)
