"""The bar while embeddings and head are read."""

from __future__ import annotations

import io

import pytest
import torch
from safetensors.torch import save_file

from swarm_client.weights import progress
from swarm_models.checkpoints.safetensors_file import read_header


class Screen(io.StringIO):
    def __init__(self, looked_at: bool) -> None:
        super().__init__()
        self._looked_at = looked_at

    def isatty(self) -> bool:
        return self._looked_at


@pytest.mark.parametrize("looked_at", [True, False])
def test_what_is_read_is_the_same_and_shown_to_who_looks(tmp_path, monkeypatch, looked_at):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(1000)}
    save_file(tensors, tmp_path / "t.safetensors")
    screen = Screen(looked_at)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(progress, "_DELAY_S", 0)
    with progress.reading_shown(read_header(tmp_path / "t.safetensors")) as stored:
        first = stored["b"][...]
        assert torch.equal(first, tensors["b"])
        shown = screen.getvalue()
        assert torch.equal(stored["a"][...], tensors["a"])
    assert ("loading embeddings and head" in shown) == looked_at
    assert bool(screen.getvalue()) == looked_at
