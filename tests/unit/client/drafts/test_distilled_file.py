"""Files of drafts: what is written is read again, and anything else is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from swarm_client.drafts.distilled.file import load_draft, save_draft
from swarm_client.drafts.distilled.network import DraftNetwork, DraftShape
from swarm_protocol.errors import CheckpointError

SHAPE = DraftShape(40, 32, 16, 24, num_blocks=2, num_heads=2, num_kv_heads=1, context=64)


@pytest.fixture
def network() -> DraftNetwork:
    torch.manual_seed(0)
    return DraftNetwork(SHAPE)


@pytest.fixture
def path(tmp_path: Path, network: DraftNetwork) -> Path:
    path = tmp_path / "draft.safetensors"
    save_draft(network, "org/model", 0.4567, path)
    return path


def load(path: Path, base_model: str = "org/model", vocab_size: int = 40, hidden: int = 32) -> DraftNetwork:
    return load_draft(path, base_model=base_model, vocab_size=vocab_size, model_hidden_size=hidden)[0]


def rewritten(path: Path, **header: str | None) -> Path:
    with safe_open(path, "pt") as file:
        metadata = {**file.metadata(), **header}
    save_file(load_file(path), path, metadata={name: value for name, value in metadata.items() if value is not None})
    return path


def test_weights_are_read_again_to_within_half_a_step_of_int8(path, network):
    loaded, acceptance = load_draft(path, base_model="org/model", vocab_size=40, model_hidden_size=32)
    assert loaded.shape == SHAPE and not loaded.training and acceptance == 0.457
    for name, value in network.state_dict().items():
        read = loaded.state_dict()[name]
        if value.ndim < 2:
            assert torch.equal(read, value)
        else:
            assert ((read - value).abs() <= value.abs().amax(1, keepdim=True) / 254 * 1.001).all()
    assert path.stat().st_size < 1.5 * sum(value.numel() for value in network.state_dict().values()) + 8000


def test_anyone_may_read_what_is_written_and_nothing_else_is_left(path):
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["org/model", "other/model", "/some/where/model", "model"])
def test_a_model_may_have_moved(path, name):
    load(path, name)


def test_a_draft_for_another_model_is_refused(path):
    with pytest.raises(ValueError, match="is a draft for org/model, not for bigger"):
        load(path, "org/bigger")
    with pytest.raises(ValueError, match="vocab_size 40, but that of model is 41"):
        load(path, vocab_size=41)
    with pytest.raises(ValueError, match="model_hidden_size 32, but that of model is 64"):
        load(path, hidden=64)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": None}, "is no draft: its header has the format None"),
        ({"format": "swarm-draft-2"}, "expected 'swarm-draft-1'"),
        ({"num_blocks": None}, "the num_blocks '', expected a size"),
        ({"num_blocks": "-1"}, "expected a size"),
        ({"num_blocks": "9" * 30}, "expected a size"),
        ({"num_blocks": "9999"}, "no draft can have"),
        ({"acceptance": None}, "the acceptance '', expected"),
        ({"acceptance": "1.5"}, "the acceptance '1.5', expected"),
        ({"acceptance": "nan"}, "the acceptance 'nan', expected"),
        ({"num_heads": "7"}, "no draft can have"),
        ({"num_kv_heads": "4"}, "no draft can have"),
        ({"num_blocks": "3"}, "is missing, expected"),
        ({"intermediate_size": "25"}, r"has the shape \(24, 16\), expected \(25, 16\)"),
    ],
)
def test_headers_that_do_not_fit_are_refused(path, header, message):
    with pytest.raises(CheckpointError, match=message):
        load(rewritten(path, **header))


def test_damaged_files_are_refused(path):
    data = path.read_bytes()
    for broken in (b"", data[:100], data[:-1], b"\0" * 64, b"\xff" * 64):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"draft.safetensors (is|holds)"):
            load(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load(path)
