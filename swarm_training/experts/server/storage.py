"""Experts on disk: a file in the safetensors format for each, named after its cell."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarm_protocol.atomic_file import remove_abandoned, written_atomically
from swarm_training.experts.core.cells import Cell, expert_name

_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class ExpertFiles:
    """The files of one mixture in a directory, whose other files are left alone."""

    directory: Path
    name: str

    def cells(self) -> list[Cell]:
        """Return the sorted cells of the experts in the directory. Raise ValueError if the directory cannot be made or
        read."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            names = [path.name for path in self.directory.iterdir()]
        except OSError as error:
            raise ValueError(f"cannot keep experts in {self.directory}: {error.strerror}") from None
        remove_abandoned(self.directory)
        pattern = re.compile(rf"{re.escape(self.name)}((?:\.\d{{1,4}})+){re.escape(_SUFFIX)}")
        found = filter(None, map(pattern.fullmatch, names))
        return sorted(tuple(map(int, match[1].split(".")[1:])) for match in found)

    def write(self, cell: Cell, state: dict[str, torch.Tensor]) -> None:
        """Replace the expert's file atomically. Raise OSError if that fails."""
        try:
            with written_atomically(self._path(cell)) as partial:
                save_file(state, partial, metadata={"expert": expert_name(self.name, cell)})
        except SafetensorError as error:
            raise OSError(str(error)) from None

    def read(self, cell: Cell) -> dict[str, torch.Tensor]:
        """Read an expert's tensors. Raise ValueError if the file is damaged."""
        try:
            with safe_open(self._path(cell), "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot read {self._path(cell)}: {error}") from None

    def move(self, cell: Cell, to: Cell) -> None:
        """Rename an expert's file, if there is one. Raise OSError if that fails."""
        with suppress(FileNotFoundError):
            os.replace(self._path(cell), self._path(to))

    def _path(self, cell: Cell) -> Path:
        return self.directory / f"{expert_name(self.name, cell)}{_SUFFIX}"
