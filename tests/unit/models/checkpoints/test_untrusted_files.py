"""Checkpoints and adapters that strangers have damaged or made: read, or refused by an error of ours and no other."""

from __future__ import annotations

import json
import logging
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from math import nan
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.safetensors_file import MAX_HEADER_BYTES, read_header
from swarm_protocol.errors import CheckpointError
from tests.attack.fuzzing.files import Files
from tests.attack.fuzzing.mutations import mutated_json
from tests.zoo import save_checkpoint


def write_header(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file; ``header`` is bytes, or what JSON is made of."""
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
NEXT = {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}
HEADERS = {
    "no entry": ({"a": 3}, "entry of 'a' has no dtype"),
    "a list": ([ENTRY], "header holds a JSON list, expected an object"),
    "nested": (b"[" * 100_000, "header is no valid JSON: it is nested too deeply"),
    "deep metadata": ({"__metadata__": json.loads("[" * 40 + "]" * 40), "a": ENTRY}, "header is nested too deeply"),
    "unknown dtype": ({"a": {**ENTRY, "dtype": "F12"}}, "holds 'a' as 'F12', which is not supported"),
    "no dtype": ({"a": {**ENTRY, "dtype": ["F32"]}}, "entry of 'a' has no dtype"),
    "no shape": ({"a": {**ENTRY, "shape": None}}, "entry of 'a' has no shape"),
    "negative": ({"a": {**ENTRY, "shape": [-2, -2]}}, "entry of 'a' has no shape"),
    "truths": ({"a": {**ENTRY, "shape": [True, 4]}}, "entry of 'a' has no shape"),
    "many dimensions": ({"a": {**ENTRY, "shape": [1] * 17}}, "entry of 'a' has no shape of at most 16 sizes"),
    "huge": ({"a": {**ENTRY, "shape": [10**30, 0]}}, "entry of 'a' has no shape"),
    "another size": ({"a": {**ENTRY, "shape": [3, 2]}}, r"size of 'a' does not fit its shape \[3, 2\]"),
    "backwards": ({"a": {**ENTRY, "data_offsets": [16, 0]}}, "size of 'a' does not fit its shape"),
    "before the beginning": ({"a": {**ENTRY, "data_offsets": [-16, 0]}}, "entry of 'a' does not say where its data"),
    "one offset": ({"a": {**ENTRY, "data_offsets": [16]}}, "entry of 'a' does not say where its data begin and end"),
    "no number": ({"a": {**ENTRY, "data_offsets": ["0", "16"]}}, "entry of 'a' does not say where its data"),
    "past the end": ({"a": {**ENTRY, "data_offsets": [1 << 40, (1 << 40) + 16]}}, "is truncated: its header speaks of"),
    "overlap": ({"a": ENTRY, "b": {**NEXT, "data_offsets": [8, 16]}}, "is damaged: .* has"),
    "same data": ({"a": ENTRY, "b": {**ENTRY}, "c": NEXT}, "is damaged: the data of 'b' overlap those of another"),
    "gap": ({"b": NEXT}, "is damaged: the data of 'b' begin after a gap"),
    "long name": ({"a" * 600: ENTRY}, "has a name of more than 512 characters"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_are_refused(tmp_path: Path, name: str) -> None:
    header, sentence = HEADERS[name]
    path = write_header(tmp_path / "some.safetensors", header, bytes(24))
    with pytest.raises(CheckpointError, match=rf"some\.safetensors .*{sentence}") as caught:
        read_header(path)
    assert "\n" not in str(caught.value)


def test_a_header_that_is_longer_than_any(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    with path.open("ab") as file:
        file.truncate(2 * MAX_HEADER_BYTES)
    with pytest.raises(CheckpointError, match=r"some\.safetensors is no safetensors file"):
        read_header(path)


def test_a_header_in_order_is_read(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": NEXT, "a": ENTRY, "c": {**NEXT, "shape": [0, 9]}}
    header["c"]["data_offsets"] = [24, 24]
    tensors = read_header(write_header(tmp_path / "some.safetensors", header, bytes(range(24))))
    assert {name: tuple(stored.read().shape) for name, stored in tensors.items()} == {
        "a": (2, 2),
        "b": (2,),
        "c": (0, 9),
    }
    assert tensors["b"].read().view(torch.uint8).tolist() == list(range(16, 24))


INDEX = "model.safetensors.index.json"
ELSEWHERE = [
    "/etc/passwd",
    "../model.safetensors",
    "a/../../b",
    "..",
    ".",
    "",
    "a//b",
    "./a",
    "C:\\a",
    "a\\..\\..\\b",
    "a\0b",
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file."""
    directory = tmp_path_factory.mktemp("models") / "llama"
    save_checkpoint("llama", directory, max_shard_size="1GB")
    return directory


def copy_of(model: Path, directory: Path, **contents: Any) -> Path:
    """A copy of a checkpoint; contents, by the names of files without their ends, replace those of JSON files."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    for name, content in contents.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("shard", [*ELSEWHERE, "x" * 300, "a\nb"])
def test_an_index_does_not_lead_out_of_the_directory(llama: Path, tmp_path: Path, shard: str) -> None:
    directory = copy_of(llama, tmp_path / "model")
    names = read_header(directory / "model.safetensors")
    (directory / "model.safetensors").rename(tmp_path / "model.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    with pytest.raises(
        CheckpointError, match=r"index\.json names a file .*: expected one in the same directory"
    ) as caught:
        ModelCheckpoint.open(directory)
    assert "\n" not in str(caught.value)


def test_an_index_may_name_a_directory_below(llama: Path, tmp_path: Path) -> None:
    directory = copy_of(llama, tmp_path / "model")
    names = read_header(directory / "model.safetensors")
    (directory / "shards").mkdir()
    (directory / "model.safetensors").rename(directory / "shards" / "1.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "shards/1.safetensors")}))
    assert set(ModelCheckpoint.open(directory).tensor_names) == set(names)


def test_a_link_to_somewhere_else_is_refused(llama: Path, tmp_path: Path) -> None:
    directory = copy_of(llama, tmp_path / "model")
    (directory / "config.json").rename(tmp_path / "config.json")
    (directory / "config.json").symlink_to(Path("..") / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is a link to .*, outside .*: expected the file itself"):
        ModelCheckpoint.open(directory)


def test_weights_may_lie_on_another_disk(llama: Path, tmp_path: Path) -> None:
    directory = copy_of(llama, tmp_path / "model")
    (directory / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (directory / "model.safetensors").symlink_to(tmp_path / "weights.safetensors")
    assert set(ModelCheckpoint.open(directory).tensor_names) == set(read_header(tmp_path / "weights.safetensors"))


def test_links_inside_the_directory_and_of_the_hubs_cache_are_followed(llama: Path, tmp_path: Path) -> None:
    directory = copy_of(llama, tmp_path / "model")
    (directory / "config.json").rename(directory / "another.json")
    (directory / "config.json").symlink_to("another.json")
    assert ModelCheckpoint.open(directory).config.num_hidden_layers == 6

    snapshot = copy_of(llama, tmp_path / "models--some--llama" / "snapshots" / "0123")
    (tmp_path / "models--some--llama" / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(tmp_path / "models--some--llama" / "blobs" / str(number))
        path.symlink_to(Path("../../blobs") / str(number))
    assert ModelCheckpoint.open(snapshot).config.num_hidden_layers == 6
    (tmp_path / "linked").symlink_to(snapshot)
    assert ModelCheckpoint.open(tmp_path / "linked").config.num_hidden_layers == 6
    (tmp_path / "downloaded").mkdir()  # as the hub's client does into a directory of one's own
    for path in snapshot.iterdir():
        (tmp_path / "downloaded" / path.name).symlink_to(path.resolve())
    assert ModelCheckpoint.open(tmp_path / "downloaded").config.num_hidden_layers == 6

    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "model" / "another.json")
    with pytest.raises(CheckpointError, match=r"config\.json is a link to"):
        ModelCheckpoint.open(snapshot)


def test_files_of_another_checkpoint_may_be_linked_under_their_names(llama: Path, tmp_path: Path) -> None:
    other, directory = copy_of(llama, tmp_path / "other"), tmp_path / "model"
    (other / ".env").write_text("HF_TOKEN=secret")
    directory.mkdir()
    for path in other.iterdir():
        (directory / path.name).symlink_to(path)
    assert ModelCheckpoint.open(directory).revision == ModelCheckpoint.open(other).revision
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "generation_config.json").symlink_to(other / ".env")  # under another name
    sentence = r"\.env, outside .*: expected the file itself, or a link to generation_config\.json in the directory of"
    with pytest.raises(CheckpointError, match=sentence):
        assert ModelCheckpoint.open(directory).generation_config
    (other / "model.safetensors").unlink()  # nothing says any longer that a model is there
    with pytest.raises(CheckpointError, match=r"config\.json is a link to"):
        ModelCheckpoint.open(directory)


@pytest.mark.parametrize("file", ["config", "generation_config", INDEX.removesuffix(".json")])
def test_json_that_is_nested_or_large(llama: Path, tmp_path: Path, file: str) -> None:
    directory = copy_of(llama, tmp_path)
    for text, sentence in (
        ('{"a":' * 100_000, "is no valid JSON: it is nested too deeply"),
        ('{"a":' * 50 + "1" + "}" * 50, "is nested too deeply: expected at most 32 levels of JSON"),
        ("[]", "holds a JSON list, expected an object"),
    ):
        (directory / f"{file}.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"{file}\.json {sentence}"):
            assert ModelCheckpoint.open(directory).generation_config
    with (directory / f"{file}.json").open("wb") as large:
        large.truncate(65 << 20)
    with pytest.raises(CheckpointError, match=rf"{file}\.json is too large: expected at most"):
        assert ModelCheckpoint.open(directory).generation_config


def test_generation_config_that_makes_no_sense(llama: Path, tmp_path: Path) -> None:
    for config, sentence in (
        ({"temperature": nan}, "has temperature=nan: expected a finite number"),
        ({"early_stopping": "x", "num_beams": []}, "is no generation config: "),
    ):
        directory = copy_of(llama, tmp_path, generation_config=config)
        with pytest.raises(CheckpointError, match=rf"generation_config\.json {sentence}"):
            assert ModelCheckpoint.open(directory).generation_config


def test_mutated_headers_take_no_memory(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": ENTRY, "b": NEXT, "c": {**NEXT, "data_offsets": [24, 32]}}
    for number in range(150):
        path = write_header(tmp_path / "mutated.safetensors", mutated_json(header, Random(number)), bytes(32))
        tracemalloc.start()
        try:
            with suppress(CheckpointError):
                for stored in read_header(path).values():
                    assert tuple(stored.read().shape) == stored.shape
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    logger = logging.getLogger("transformers")
    level = logger.level
    yield Files(tmp_path_factory.mktemp("fuzzed"))
    logger.setLevel(level)  # the fuzzer silences it, and other tests read what it says


@pytest.mark.parametrize("kind", ["config.json", "index", "safetensors", "adapter"])
def test_changed_files_are_read_or_refused_by_a_sentence(files: Files, kind: str) -> None:
    assert {files.kinds[kind](Random(f"{kind}/{number}")) for number in range(50)} == {"read", "refused"}
