"""The sources of texts: lines of files, or a streamed data set, in epochs that can be resumed at every text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import parse_object
from swarm_training.data.order import EVERYTHING, DataShard, SampleOrder

if TYPE_CHECKING:
    from datasets import IterableDataset

SUFFIXES = (".txt", ".jsonl")
State = dict[str, Any]  # values of JSON


def local_texts(path: Path) -> list[Path]:
    """Return the files of text at this path; none if it is a data set, or nothing is there.

    Raise ValueError if something else is there.
    """
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path} is no file of text: expected {' or '.join(SUFFIXES)}")
        return [path]
    if not path.is_dir() or (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return []
    files = [file for suffix in SUFFIXES for file in path.rglob(f"*{suffix}") if file.is_file()]
    if not files:
        raise ValueError(f"{path} has no files of text in it: expected some {' or '.join(SUFFIXES)}")
    return files


class FileTexts:
    """A source of the lines of files, without blank ones; the order of the files changes with each epoch. Its state
    says which text comes next.

    A line of .jsonl is an object with a string "text". Each part takes every ``count``-th line of a file.
    """

    def __init__(self, files: Sequence[Path], seed: str, part: DataShard = EVERYTHING) -> None:
        """Start at the first of the files, of which there must be one."""
        self._files = sorted(files)
        self._order = SampleOrder(seed, len(files))
        self._part = part
        self._epoch = self._place = self._offset = self._line = 0  # offset: bytes of the file at this place

    def texts(self) -> Iterator[str]:
        """Yield the texts. Raise ValueError with the number of the line if a line cannot be read."""
        while self._place < len(self._files):
            position = self._epoch * len(self._files) + self._place
            path = self._files[int(self._order.samples(np.array([position]))[0])]
            with path.open("rb") as lines:
                lines.seek(self._offset)
                for line in lines:
                    # Before the line is yielded, so that a state that is saved meanwhile begins with the next one.
                    self._offset += len(line)
                    self._line += 1
                    is_ours = (self._line - 1) % self._part.count == self._part.index
                    if is_ours and line.strip():
                        yield _text_of(line, path, self._line)
            self._place, self._offset, self._line = self._place + 1, 0, 0

    def next_epoch(self) -> None:
        self._epoch, self._place, self._offset, self._line = self._epoch + 1, 0, 0, 0

    def state_dict(self) -> State:
        return {"epoch": self._epoch, "place": self._place, "offset": self._offset, "line": self._line}

    def load_state_dict(self, state: State) -> None:
        self._epoch, self._place = state["epoch"], state["place"]
        self._offset, self._line = state["offset"], state["line"]


class StreamedTexts:
    """A source of texts in a column of a ``datasets.IterableDataset``; the order of shards changes with each epoch.

    With at least as many shards as parts, each part takes shards of its own; otherwise it takes every ``count``-th
    example of all shards. Peers that do not divide the data take everything, each with its own seed.
    """

    def __init__(self, dataset: IterableDataset, seed: str, part: DataShard = EVERYTHING, column: str = "text") -> None:
        self._dataset = dataset
        self._column = column
        self._num_shards: int = dataset.num_shards
        self._order = SampleOrder(seed, self._num_shards)
        by_shards = self._num_shards >= part.count
        self._shards, self._examples = (part, EVERYTHING) if by_shards else (EVERYTHING, part)
        self._epoch = self._place = self._example = 0  # example: number read of the shard at this place
        self._in_shard: State | None = None  # state of the shard's reader; None: at its beginning

    def texts(self) -> Iterator[str]:
        """Yield the texts. Raise ValueError if there is no such column of strings."""
        while (place := self._shards.index + self._place * self._shards.count) < self._num_shards:
            index = int(self._order.samples(np.array([self._epoch * self._num_shards + place]))[0])
            shard = self._dataset.shard(num_shards=self._num_shards, index=index)
            if self._in_shard is not None:
                shard.load_state_dict(self._in_shard)
            for row in shard:
                self._in_shard = shard.state_dict()
                self._example += 1
                if (self._example - 1) % self._examples.count == self._examples.index:
                    yield self._text_of(row)
            self._place, self._example, self._in_shard = self._place + 1, 0, None

    def _text_of(self, row: dict[str, Any]) -> str:
        text = row.get(self._column)
        if not isinstance(text, str):
            names = ", ".join(sorted(row))
            raise ValueError(f"the data set has no strings in a column {self._column!r}: its columns are {names}")
        return text

    def next_epoch(self) -> None:
        self._epoch, self._place, self._example, self._in_shard = self._epoch + 1, 0, 0, None

    def state_dict(self) -> State:
        state = {"epoch": self._epoch, "place": self._place, "example": self._example}
        return {**state, "in_shard": self._in_shard}

    def load_state_dict(self, state: State) -> None:
        self._epoch, self._place = state["epoch"], state["place"]
        self._example, self._in_shard = state["example"], state["in_shard"]


TextSource = FileTexts | StreamedTexts


def _text_of(line: bytes, path: Path, number: int) -> str:
    where = f"line {number} of {path}"
    try:
        text = line.decode().strip("\r\n").removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8 text") from None
    if path.suffix != ".jsonl":
        return text
    try:
        found = parse_object(line, where).get("text")
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, str):
        raise ValueError(f'{where} has "text": {json.dumps(found)[:40]}: expected a string')
    return found
