"""The reporter that writes files for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoardReporter:
    """A directory with files of events, which ``tensorboard --logdir`` shows."""

    def __init__(self, directory: str, run: str) -> None:
        """Prepare the directory, which is for the run of this name alone. Raises ValueError if there can be none."""
        self._directory = Path(directory)
        self._writer: SummaryWriter | None = None
        self._last_step = -1
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"the reports of run {run} cannot be in {directory}: {error.strerror}") from None

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the numbers of a step. After a rollback, TensorBoard no longer shows the steps that were undone."""
        if self._writer is None or step <= self._last_step:
            self.close()
            self._writer = SummaryWriter(str(self._directory), purge_step=step)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        self._last_step = step

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
