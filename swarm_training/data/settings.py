"""The data of a run: a table of its run file."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_training.core.checks import require


@dataclass(frozen=True)
class DataSettings:
    """The data settings of a run. The constructor raises ValueError if a field is out of its range."""

    source: str  # a file or directory of .txt and .jsonl, a directory of ``datasets``, or a data set on the hub
    block_length: int
    streaming: bool = False  # whether data are read while training; otherwise all data are tokenised first
    column: str = "text"
    split: str = "train"
    config: str = ""  # the configuration of a data set on the hub that has several
    buffer_size: int = 1000  # the size of the shuffling buffer when streaming, in blocks

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("source is empty: expected a file, a directory or the name of a data set on the hub")
        require(self, "block_length", self.block_length >= 2, "at least 2 tokens")
        require(self, "buffer_size", self.buffer_size >= 1, "at least 1 block")
