"""The way from data that a user names to batches: a file, a directory, a data set on disk or on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm_protocol.failures import first_line
from swarm_training.data.blocks import BlockBatches, TokenBlocks, Tokenize
from swarm_training.data.order import EVERYTHING, DataShard, PartCursor, SampleOrder, derived_seed
from swarm_training.data.settings import DataSettings
from swarm_training.data.sources import FileTexts, StreamedTexts, TextSource, local_texts
from swarm_training.data.streaming import StreamBatches, StreamSettings

if TYPE_CHECKING:
    from datasets import IterableDataset


@dataclass(frozen=True)
class DataReader:
    """The peer that reads the data. ``part``: the part of the data that this peer takes, if peers divide them; None:
    all data, in an order of its own."""

    run: str
    peer_id: str
    part: DataShard | None = None

    @property
    def seed(self) -> str:
        """Return the seed of the data's order, which is the same for all peers if they have parts."""
        return derived_seed(self.run) if self.part is not None else derived_seed(self.run, self.peer_id)


def open_source(data: DataSettings, reader: DataReader) -> TextSource:
    """Return the source of the texts. Raise ValueError if there are no such data."""
    part = reader.part or EVERYTHING
    path = Path(data.source).expanduser()
    if files := local_texts(path):
        return FileTexts(files, reader.seed, part)
    return StreamedTexts(_dataset(data, path), reader.seed, part, data.column)


def open_batches(
    data: DataSettings, reader: DataReader, tokenize: Tokenize, end: int | None, batch_size: int, cache: Path
) -> BlockBatches | StreamBatches:
    """Return the reader's batches. ``cache``: a directory for the tokens of these data, unused if they are streamed.
    Raise ValueError if there are no such data."""
    if data.streaming:
        settings = StreamSettings(tokenize, end, data.block_length, data.buffer_size, batch_size, reader.seed)
        return StreamBatches(open_source(data, reader), settings)
    blocks = open_blocks(data, reader.run, tokenize, end, cache)
    return BlockBatches(
        blocks, PartCursor(SampleOrder(reader.seed, len(blocks)), reader.part or EVERYTHING), batch_size
    )


def open_blocks(data: DataSettings, run: str, tokenize: Tokenize, end: int | None, cache: Path) -> TokenBlocks:
    """Return all data, in an order that is the same for all peers of the run. Raise ValueError if there are none."""
    texts = open_source(data, DataReader(run, "", EVERYTHING)).texts()  # of the first epoch
    return TokenBlocks.pack_to_disk(cache, texts, tokenize, end, data.block_length)


def open_held_out(data: DataSettings, samples: int, tokenize: Tokenize, end: int | None) -> TokenBlocks:
    """Return the first samples of held-out data, in memory. They are the same at all peers of all runs. Raise
    ValueError if there are no such data, or not one sample."""
    texts = open_source(data, DataReader("held-out data", "", EVERYTHING)).texts()
    return TokenBlocks.pack(texts, tokenize, end, data.block_length, samples)


def _dataset(data: DataSettings, path: Path) -> IterableDataset:
    import datasets

    try:
        if not path.is_dir():
            return datasets.load_dataset(data.source, data.config or None, split=data.split, streaming=True)
        found: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:  # from the hub, about arguments, or about what is in the files
        raise ValueError(
            f"{data.source} is no file or directory, and no data set on the hub that can be read: {first_line(error)}"
        ) from None
    if isinstance(found, datasets.DatasetDict):
        if data.split not in found:
            raise ValueError(f"{path} has no split {data.split!r}: expected one of {', '.join(found)}")
        found = found[data.split]
    return found.to_iterable_dataset(num_shards=max(1, min(64, len(found) // 1000)))
