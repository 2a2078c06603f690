"""Streams: what a buffer gives, parts that share the data out, and resuming at every single block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from swarm_training.data.blocks import BlockBatches, TokenBlocks
from swarm_training.data.opening import DataReader, open_batches, open_source
from swarm_training.data.order import EVERYTHING, DataShard, PartCursor, SampleOrder
from swarm_training.data.settings import DataSettings
from swarm_training.data.sources import FileTexts, State, StreamedTexts, TextSource
from swarm_training.data.streaming import StreamBatches, StreamSettings

END = 1


def tokenize(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def texts_of(lengths: list[int], first: int = 10) -> list[str]:
    """Numbers in a row, so that every token says which it is."""
    texts = []
    for length in lengths:
        texts.append(" ".join(map(str, range(first, first + length))))
        first += length
    return texts


LENGTHS = [3, 1, 40, 2, 2, 7, 11, 0, 5, 23, 4, 1, 1, 8, 17, 6]  # a document longer than a buffer is among them


def files_source(directory: Path) -> FileTexts:
    texts = texts_of(LENGTHS)
    (directory / "a.txt").write_text("\n".join(texts[:6]) + "\n")
    (directory / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[6:]))
    return FileTexts([directory / "a.txt", directory / "b.jsonl"], "seed")


def streamed_source(num_shards: int = 3, part: DataShard = EVERYTHING, seed: str = "seed") -> StreamedTexts:
    dataset = datasets.Dataset.from_dict({"text": texts_of(LENGTHS)})
    return StreamedTexts(dataset.to_iterable_dataset(num_shards=num_shards), seed, part)


def generated_source() -> StreamedTexts:
    """Of a generator, as data sets on the hub with scripts are, and with a step of ``map`` after it."""

    def rows(shards: list[int]) -> Iterator[dict[str, str]]:
        texts = texts_of(LENGTHS)
        for shard in shards:
            yield from ({"text": text} for text in texts[4 * shard : 4 * shard + 4])

    dataset = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]})
    return StreamedTexts(dataset.map(lambda row: {"text": row["text"]}), "seed")


def batches(source: TextSource, buffer_size: int = 3, batch_size: int = 1) -> StreamBatches:
    return StreamBatches(source, StreamSettings(tokenize, END, 8, buffer_size, batch_size, "seed"))


def test_a_buffer_gives_the_blocks_of_the_texts_in_another_order(tmp_path: Path) -> None:
    """Independent truth: the texts of an epoch one after the other, cut by hand."""
    (tmp_path / "a.txt").write_text("\n".join(texts_of(LENGTHS)))
    tokens = [token for text in texts_of(LENGTHS) if text for token in [*tokenize(text), END]]
    blocks = [tokens[start : start + 8] for start in range(0, len(tokens) - 7, 8)]
    stream = batches(FileTexts([tmp_path / "a.txt"], "seed"), buffer_size=5)
    for _ in range(3):
        epoch = [stream.next_batch()[0].tolist() for _ in blocks]
        assert epoch != blocks
        for start in range(0, len(blocks), 5):
            assert sorted(epoch[start : start + 5]) == sorted(blocks[start : start + 5])


@pytest.mark.parametrize("kind", ["files", "streamed", "generated"])
def test_resuming_after_any_block_gives_the_sequence_of_an_uninterrupted_run(kind: str, tmp_path: Path) -> None:
    def fresh() -> StreamBatches:
        if kind == "files":
            return batches(files_source(tmp_path))
        return batches(streamed_source() if kind == "streamed" else generated_source())

    number = 60  # three epochs and more
    stream, states, whole = fresh(), list[State](), list[torch.Tensor]()
    for _ in range(number):
        states.append(json.loads(json.dumps(stream.state_dict())))
        whole.append(stream.next_batch())
    for after, state in enumerate(states):
        resumed = fresh()
        resumed.load_state_dict(state)
        assert json.loads(json.dumps(resumed.state_dict())) == state
        for expected in whole[after : after + 8]:
            assert torch.equal(resumed.next_batch(), expected), (after, state)
    assert all(len(json.dumps(state)) < 2000 for state in states)  # no tokens are in it


def test_an_older_state_is_loaded_into_a_stream_that_has_gone_on() -> None:
    stream = batches(streamed_source(), batch_size=2)
    stream.next_batch()
    state = stream.state_dict()
    expected = [stream.next_batch() for _ in range(9)]
    stream.load_state_dict(state)
    assert all(torch.equal(stream.next_batch(), batch) for batch in expected)


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    def stream(lengths: list[int], name: str) -> StreamBatches:
        (tmp_path / name).write_text("\n".join(texts_of(lengths)))
        return batches(FileTexts([tmp_path / name], "seed"))

    one = stream([30, 30], "one.txt")
    for _ in range(6):
        one.next_batch()
    assert one.state_dict()["used"] > 0
    for lengths in ([5, 4, 20], [26, 12]):
        with pytest.raises(ValueError, match="the data are not those of the saved state"):
            stream(lengths, f"{len(lengths)}.txt").load_state_dict(one.state_dict())


def test_a_stream_whose_state_is_refused_starts_over(tmp_path: Path) -> None:
    files_source(tmp_path)
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    orders: dict[int, str] = {}  # a seed for each file that may come first
    for seed in map(str, range(99)):
        orders.setdefault(int(SampleOrder(seed, 2).samples(np.array([0]))[0]), seed)
    text_first, json_first = (batches(FileTexts(files, orders[first])) for first in (0, 1))
    state = text_first.state_dict()
    state |= {
        "source": state["source"] | {"offset": 3, "line": 1},
        "buffer": 0,
    }  # in a line of JSON, in the other order
    with pytest.raises(ValueError):
        json_first.load_state_dict(state)
    fresh = batches(FileTexts(files, orders[1]))
    assert all(torch.equal(json_first.next_batch(), fresh.next_batch()) for _ in range(9))


@pytest.mark.parametrize(("num_shards", "num_parts"), [(6, 2), (5, 3), (2, 5), (1, 3)])
def test_parts_share_every_epoch_out(num_shards: int, num_parts: int) -> None:
    """Whether there are shards for all of them or not; the order changes with the epoch."""
    sources = [streamed_source(num_shards, DataShard(index, num_parts)) for index in range(num_parts)]
    epochs = []
    for _ in range(2):
        epochs.append([text for source in sources for text in source.texts()])
        for source in sources:
            source.next_epoch()
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(texts_of(LENGTHS))
    assert num_shards < 3 or epochs[0] != epochs[1]


def test_parts_share_out_the_lines_of_files(tmp_path: Path) -> None:
    whole = list(files_source(tmp_path).texts())
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    parts = [list(FileTexts(files, "seed", DataShard(index, 3)).texts()) for index in range(3)]
    assert sorted(text for part in parts for text in part) == sorted(whole)
    assert len(whole) == len([length for length in LENGTHS if length]) + 1 and all(parts)  # an empty "text" is one


def test_peers_without_parts_have_orders_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(texts_of([7] * 50)))
    data = DataSettings(str(tmp_path / "a.txt"), 8, streaming=True, buffer_size=50)

    def epoch(peer_id: str) -> list[list[int]]:
        stream = open_batches(data, DataReader("run", peer_id), tokenize, END, 50, tmp_path / "cache")
        return stream.next_batch().tolist()

    one, other = epoch("QmA"), epoch("QmB")
    assert one == epoch("QmA") and one != other and sorted(one) == sorted(other)


def test_tables_are_shared_out_and_kept_on_disk(tmp_path: Path) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    (source / "a.txt").write_text("\n".join(texts_of([7] * 30)))
    data, cache = DataSettings(str(source), 8), tmp_path / "cache"
    rows = []
    for index in range(3):
        part = open_batches(data, DataReader("run", f"Qm{index}", DataShard(index, 3)), tokenize, END, 10, cache)
        rows += part.next_batch().tolist()
    assert sorted(rows) == [[*range(10 + 7 * row, 17 + 7 * row), END] for row in range(30)]
    (source / "a.txt").write_text("nothing that could be tokenised")  # read once
    again = open_batches(data, DataReader("run", "Qm0", DataShard(0, 3)), tokenize, END, 10, cache)
    assert again.next_batch().tolist() == rows[:10]
    with (cache / "tokens.bin").open("ab") as file:
        file.write(b"1234")
    with pytest.raises(ValueError, match=r"is damaged: its tokens\.bin is not as tokens\.json says"):
        open_batches(data, DataReader("run", "Qm0"), tokenize, END, 10, cache)


def test_packing_in_memory_and_on_disk_agree(tmp_path: Path) -> None:
    texts = texts_of(LENGTHS)
    one = TokenBlocks.pack(texts, tokenize, None, 8)
    other = TokenBlocks.pack_to_disk(tmp_path / "cache", texts, tokenize, None, 8)
    tokens = torch.tensor([token for text in texts for token in tokenize(text)])
    expected = tokens[: len(tokens) // 8 * 8].view(-1, 8)
    for blocks in (one, other):
        in_order = BlockBatches(blocks, PartCursor(SampleOrder("x", len(blocks))), len(blocks)).next_batch()
        assert sorted(in_order.tolist()) == expected.tolist()
        assert torch.equal(blocks.rows(torch.arange(len(blocks)).numpy()), expected)


def test_no_more_texts_are_read_than_the_blocks_need() -> None:
    texts = iter(texts_of([3] * 10))
    blocks = TokenBlocks.pack(texts, tokenize, END, 8, most_blocks=2)
    assert len(blocks) == 2 and len(list(texts)) == 6  # a text has four tokens with its end


def test_data_sets_on_disk_are_read(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"content": texts_of(LENGTHS)})
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "several"))
    for name in ("one", "several"):
        source = open_source(DataSettings(str(tmp_path / name), 8, column="content"), DataReader("run", "QmA"))
        assert list(source.texts()) == texts_of(LENGTHS)
    with pytest.raises(ValueError, match="has no split 'test': expected one of train"):
        open_source(DataSettings(str(tmp_path / "several"), 8, split="test"), DataReader("run", "QmA"))
    with pytest.raises(ValueError, match="no strings in a column 'text': its columns are content"):
        list(open_source(DataSettings(str(tmp_path / "one"), 8), DataReader("run", "QmA")).texts())
    (tmp_path / "several" / "dataset_dict.json").write_text("{}")
    with pytest.raises(ValueError, match="no data set on the hub that can be read: 'splits'"):
        open_source(DataSettings(str(tmp_path / "several"), 8), DataReader("run", "QmA"))


def test_mistakes_are_named_in_a_sentence(tmp_path: Path) -> None:
    for text, reason in (
        (b'{"text": 3}\n', 'line 1 of .* has "text": 3: expected a string'),
        (b'{"text": "x"}\n[]\n', "line 2 of .* holds a JSON list, expected an object"),
        (b"\xff\n", "line 1 of .* is not UTF-8 text"),
    ):
        (tmp_path / "a.jsonl").write_bytes(text)
        with pytest.raises(ValueError, match=reason):
            list(FileTexts([tmp_path / "a.jsonl"], "seed").texts())
    (tmp_path / "short.txt").write_text("1 2 3\n")
    with pytest.raises(ValueError, match="fewer tokens than a block has: expected at least 8"):
        batches(FileTexts([tmp_path / "short.txt"], "seed")).next_batch()
    with pytest.raises(ValueError, match="the data have 3 tokens: expected at least a block of 8"):
        TokenBlocks.pack(["1 2 3"], tokenize, None, 8)
    (tmp_path / "empty").mkdir()
    for source, reason in (
        (tmp_path / "empty", "has no files of text in it"),
        (Path(__file__), "is no file of text: expected .txt or .jsonl"),
        ("nobody/nothing", "is no file or directory, and no data set on the hub that can be read"),
    ):
        with pytest.raises(ValueError, match=reason):
            open_source(DataSettings(str(source), 8), DataReader("run", "QmA"))
