"""Packed weights on disk: a hit computes the same bits, and whatever is wrong with a file is a miss."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.safetensors_file import StoredTensor, read_header
from swarm_models.kernels.int8_linear import quantize_rows
from swarm_models.kernels.kernel_weight import KernelWeight, PackedWeight
from swarm_models.kernels.quantized_linear import QuantizedLinear
from swarm_models.quantization import Report, packed_kind, quantize_
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.blocks.packed_layers import PackedLayers
from swarm_server.blocks.weight_cache import WeightCache, content_key
from tests.unit.support import TIMEOUT_S
from tests.zoo import save_checkpoint

CPU = torch.device("cpu")
BUDGET = 1 << 30
SHAPE = (130, 70)

pytestmark = pytest.mark.skipif(packed_kind("int8", CPU) is None, reason="the kernel is not the fastest here")


@pytest.fixture(autouse=True)
def disk_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests hold on a machine whose disk is nearly full, too."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(total=100 << 30, free=50 << 30))


def weight(seed: int = 0, shape: tuple[int, int] = SHAPE) -> KernelWeight:
    return KernelWeight(*quantize_rows(torch.randn(shape, generator=torch.Generator().manual_seed(seed))))


def same(a: KernelWeight, b: KernelWeight | None) -> bool:
    return b is not None and all(map(torch.equal, a.parts, b.parts))


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(BUDGET, tmp_path / "weights")


def read(cache: WeightCache, key: str = "a" * 64) -> KernelWeight | None:
    return cache.read(key, KernelWeight, SHAPE)


def only_file(directory: Path) -> Path:
    (path,) = (directory / "weights").iterdir()
    return path


def test_what_is_read_is_what_was_written(cache: WeightCache) -> None:
    written = weight()
    assert read(cache) is None
    cache.write("a" * 64, written)
    found = read(cache)
    assert same(written, found)
    x = torch.randn(3, SHAPE[1])
    assert torch.equal(found.matmul(x), written.matmul(x)) and torch.equal(found.dequantize(), written.dequantize())


@pytest.mark.parametrize("place", [4, 40, 300, 5000, -1])
def test_a_changed_byte_is_found_anywhere(
    cache: WeightCache, tmp_path: Path, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write("a" * 64, weight())
    path = only_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert read(cache) is None
    assert "made again" in caplog.text and str(path) in caplog.text
    cache.write("a" * 64, weight())
    assert same(weight(), read(cache))


def test_pages_in_another_order_are_found(cache: WeightCache, tmp_path: Path) -> None:
    cache.write("a" * 64, weight())
    path = only_file(tmp_path)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(
        data[:start] + data[start + 4096 : start + 8192] + data[start : start + 4096] + data[start + 8192 :]
    )
    assert read(cache) is None


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\2" + bytes(7) + b"[]", b"\2" + bytes(7) + b"{}", b"\4" + bytes(7)]
)
def test_no_weight_is_a_miss(cache: WeightCache, tmp_path: Path, content: bytes) -> None:
    cache.write("a" * 64, weight())
    only_file(tmp_path).write_bytes(content)
    assert read(cache) is None


def test_a_file_that_ends_too_early_or_late_is_a_miss(cache: WeightCache, tmp_path: Path) -> None:
    cache.write("a" * 64, weight())
    path = only_file(tmp_path)
    data = path.read_bytes()
    for changed in (data[:-1], data[: len(data) // 2], data + b"\0"):
        path.write_bytes(changed)
        assert read(cache) is None


def test_a_weight_of_another_key_or_shape_is_a_miss(cache: WeightCache, tmp_path: Path) -> None:
    cache.write("a" * 64, weight())
    assert cache.read("a" * 64, KernelWeight, (SHAPE[0], SHAPE[1] + 4)) is None
    only_file(tmp_path).rename(tmp_path / "weights" / f"{'b' * 40}.weight")
    assert read(cache, "b" * 64) is None


def test_without_a_budget_nothing_is_kept(tmp_path: Path) -> None:
    cache = WeightCache(0, tmp_path / "weights")
    cache.write("a" * 64, weight())
    assert read(cache) is None and not (tmp_path / "weights").exists()


def test_a_directory_that_cannot_be_used_is_told_once(
    cache: WeightCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "weights").write_text("")
    with caplog.at_level(logging.WARNING):
        for key in "ab":
            assert read(cache, key * 64) is None
            cache.write(key * 64, weight())
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "packed weights of earlier starts are made again",
        "packed weights are not kept for the next start",
    ]


def test_on_a_disk_that_is_nearly_full_nothing_is_kept(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(total=100 << 30, free=10 << 30))
    with caplog.at_level(logging.WARNING):
        cache.write("a" * 64, weight())
    assert "less than 10% would be left free" in caplog.text and read(cache) is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_leaves_nothing_behind(
    cache: WeightCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = Path.open

    def full(path: Path, mode: str = "r", *arguments: object, **options: object) -> object:
        if mode == "wb":
            real_open(path, mode).close()
            return real_open(Path("/dev/full"), "wb", 0)
        return real_open(path, mode, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", full)
    with caplog.at_level(logging.WARNING):
        cache.write("a" * 64, weight())
    assert "No space left" in caplog.text
    assert list((tmp_path / "weights").iterdir()) == [] and read(cache) is None


def test_what_was_used_the_longest_ago_goes_first(tmp_path: Path) -> None:
    directory, size_bytes = tmp_path / "weights", sum(part.nbytes for part in weight().parts)
    for number, key in enumerate("abc"):
        WeightCache(BUDGET, directory).write(key * 64, weight(number))
        os.utime(directory / f"{key * 40}.weight", (number, number))
    assert same(weight(0), read(WeightCache(BUDGET, directory), "a" * 64))  # and is the last used from now on
    cache = WeightCache(int(3.5 * size_bytes), directory)
    cache.write("d" * 64, weight(3))
    found = {key for key in "abcd" if read(WeightCache(BUDGET, directory), key * 64) is not None}
    assert found == {"a", "c", "d"}


def test_what_this_server_uses_is_not_evicted_for_more(tmp_path: Path) -> None:
    size_bytes = sum(part.nbytes for part in weight().parts)
    cache = WeightCache(int(2.5 * size_bytes), tmp_path / "weights")
    for number, key in enumerate("abc"):
        cache.write(key * 64, weight(number))
    assert [read(cache, key * 64) is not None for key in "abc"] == [True, True, False]


def test_what_this_server_has_read_is_not_evicted(tmp_path: Path) -> None:
    size_bytes = sum(part.nbytes for part in weight().parts)
    for number, key in enumerate("abc"):
        WeightCache(BUDGET, tmp_path / "weights").write(key * 64, weight(number))
        os.utime(tmp_path / "weights" / f"{key * 40}.weight", (number, number))
    cache = WeightCache(int(3.5 * size_bytes), tmp_path / "weights")
    cache.write("d" * 64, weight(3))  # finds what there is; a goes
    assert read(cache, "b" * 64) is not None
    cache.write("e" * 64, weight(4))
    assert {key for key in "abcde" if read(cache, key * 64) is not None} == {"b", "d", "e"}


def test_who_reads_while_another_writes_has_all_of_the_older_file(cache: WeightCache, tmp_path: Path) -> None:
    cache.write("a" * 64, weight(0))
    before = only_file(tmp_path).read_bytes()
    with only_file(tmp_path).open("rb") as file:
        cache.write("a" * 64, weight(1))
        assert file.read() == before
    assert same(weight(1), read(cache))


def test_what_a_killed_server_was_writing_is_deleted_in_time(tmp_path: Path) -> None:
    directory = tmp_path / "weights"
    directory.mkdir()
    for name, age in (("old", 7200.0), ("new", 0.0)):
        path = directory / f"{name}.partial"
        path.write_bytes(b"x")
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    WeightCache(BUDGET, directory).write("a" * 64, weight())
    assert sorted(path.name for path in directory.iterdir()) == [f"{'a' * 40}.weight", "new.partial"]


def _write_and_read(directory: Path, seed: int) -> None:
    cache = WeightCache(BUDGET, directory)
    for _ in range(20):
        cache.write("a" * 64, weight(0))
        assert same(weight(0), read(cache))
        cache.write(f"{seed}" * 64, weight(seed))


def test_several_servers_at_once(tmp_path: Path) -> None:
    gc.collect()  # in a forked process, gRPC objects that nobody needs would be waited for for ever
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_and_read, args=(tmp_path / "weights", seed)) for seed in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list((tmp_path / "weights").iterdir())) == 3


def stored(path: Path) -> StoredTensor:
    return read_header(path)["weight"]


def test_a_changed_file_has_another_key(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(64, 64)}, path)
    key, times = content_key(stored(path), "packing"), path.stat()
    assert content_key(stored(path), "packing") == key != content_key(stored(path), "another")
    with path.open("r+b") as file:  # not where the sample is taken
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as if nothing had happened
    assert content_key(stored(path), "packing") != key


class CountingCache(WeightCache):
    num_written = 0

    def write(self, key: str, weight: PackedWeight) -> None:
        self.num_written += 1
        super().write(key, weight)


def load(directory: Path, cache: Path) -> tuple[BlockStack, Report, int]:
    """The blocks, what is said of them, and how many layers were packed anew."""
    kept = CountingCache(BUDGET, cache)
    layers = PackedLayers(kept, "int8", CPU, torch.float32)
    report = Report("int8")

    def prepare(block: torch.nn.Module, _index: int) -> None:
        nonlocal report
        report += quantize_(block, "int8", CPU, torch.float32)

    stack = load_blocks(ModelCheckpoint.open(directory), Span(0, 2), transform=prepare, layers=layers)
    return stack, layers.report + report, kept.num_written


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the second has biases
def test_blocks_from_the_cache_are_the_same(family: str, tmp_path: Path) -> None:
    save_checkpoint(family, tmp_path / "model")
    first, first_report, first_packed = load(tmp_path / "model", tmp_path / "weights")
    second, second_report, second_packed = load(tmp_path / "model", tmp_path / "weights")
    assert (first_packed, second_packed) == (14, 0)
    assert str(first_report) == str(second_report) and first_report.resident_bytes == second_report.resident_bytes
    hidden = torch.randn(1, 5, first.hidden_size)
    assert torch.equal(first(hidden), second(hidden))
    assert sum(isinstance(module, QuantizedLinear) for module in second.modules()) == 14


def test_a_changed_checkpoint_is_packed_anew(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path / "model")
    load(tmp_path / "model", tmp_path / "weights")
    save_checkpoint("llama", tmp_path / "model", seed=5)
    changed, _, packed = load(tmp_path / "model", tmp_path / "weights")
    assert packed == 14
    fresh, _, _ = load(tmp_path / "model", tmp_path / "elsewhere")
    hidden = torch.randn(1, 5, fresh.hidden_size)
    assert torch.equal(changed(hidden), fresh(hidden))
