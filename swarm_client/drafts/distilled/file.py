"""Files of distilled drafts: safetensors with a header that names the model for which a draft was made.

Matrices are stored in int8 with a scale for each row, other tensors in float32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import save_file

from swarm_client.drafts.distilled.network import DraftNetwork, DraftShape
from swarm_models.checkpoints.safetensors_file import StoredTensor, read_header, read_metadata
from swarm_protocol.atomic_file import written_atomically
from swarm_protocol.errors import CheckpointError

FORMAT = "swarm-draft-1"
MAX_BLOCKS = 64
_SCALES = ".scales"


def save_draft(network: DraftNetwork, base_model: str, acceptance: float, path: Path) -> None:
    """Write a draft for the model ``base_model``; the file appears whole or not at all.

    acceptance: how often the first guess is the likeliest token of the model, between 0 and 1.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, value in network.state_dict().items():
        if value.ndim == 2:
            scales = value.abs().amax(1).clamp(min=1e-12) / 127
            tensors[name] = (value / scales[:, None]).round().to(torch.int8)
            tensors[name + _SCALES] = scales.float()
        else:
            tensors[name] = value.float().contiguous()
    header = {"format": FORMAT, "base_model": base_model, "acceptance": f"{acceptance:.3f}"}
    header |= {name: str(size) for name, size in asdict(network.shape).items()}
    with written_atomically(path) as partial:
        save_file(tensors, partial, metadata=header)
        partial.chmod(0o644)  # safetensors writes files that only their owner can read


def load_draft(path: Path, *, base_model: str, vocab_size: int, model_hidden_size: int) -> tuple[DraftNetwork, float]:
    """Return the draft in a file, in float32, and the share of its guesses that were right when it was made.

    Args:
        base_model: the model to draft for, as in ``ModelCheckpoint.location``. Only the last part of the hub id or path
            counts.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or is not a draft.
        ValueError: the draft was made for another model.
    """
    header = read_metadata(path)
    if header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is no draft: its header has the format {header.get('format')!r}, expected {FORMAT!r} "
            "(examples/train_draft.py makes drafts)"
        )
    shape = _shape(path, header)
    made_for, name = header.get("base_model", ""), _last_part(base_model)
    if _last_part(made_for) != name:
        raise ValueError(f"{path} is a draft for {made_for}, not for {name}: expected one that was made for it")
    for size, expected in (("vocab_size", vocab_size), ("model_hidden_size", model_hidden_size)):
        if getattr(shape, size) != expected:
            raise ValueError(
                f"{path} is a draft for a model with {size} {getattr(shape, size)}, but that of {name} is {expected}: "
                "expected a draft for this version of the model"
            )
    return _filled(shape, path), _acceptance(path, header)


def _last_part(name_or_path: str) -> str:
    return Path(name_or_path).resolve().name


def _shape(path: Path, header: Mapping[str, str]) -> DraftShape:
    sizes = {}
    for field in fields(DraftShape):
        value = header.get(field.name, "")
        if not re.fullmatch(r"[1-9][0-9]{0,6}", value):
            raise CheckpointError(f"{path} is damaged: its header has the {field.name} {value[:20]!r}, expected a size")
        sizes[field.name] = int(value)
    shape = DraftShape(**sizes)
    if (
        shape.num_blocks > MAX_BLOCKS
        or shape.hidden_size % (2 * shape.num_heads)
        or shape.num_heads % shape.num_kv_heads
    ):
        raise CheckpointError(f"{path} is damaged: no draft can have the sizes in its header")
    return shape


def _acceptance(path: Path, header: Mapping[str, str]) -> float:
    value = header.get("acceptance", "")
    if not re.fullmatch(r"[01]\.[0-9]{1,6}", value) or float(value) > 1:
        raise CheckpointError(f"{path} is damaged: its header has the acceptance {value[:20]!r}, expected one like 0.5")
    return float(value)


def _filled(shape: DraftShape, path: Path) -> DraftNetwork:
    stored = read_header(path)
    # The file's tensors are compared with the header before any memory is taken for them.
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in DraftNetwork(shape).state_dict().items()}
    expected |= {name + _SCALES: size[:1] for name, size in expected.items() if len(size) == 2}
    for name, size in expected.items():
        if name not in stored or stored[name].shape != size:
            found = f"has the shape {stored[name].shape}" if name in stored else "is missing"
            raise CheckpointError(f"{path} is damaged: {name} {found}, expected {size}")
    network = DraftNetwork(shape)
    network.load_state_dict({name: _read(stored, name) for name in network.state_dict()})
    return network.eval().requires_grad_(False)


def _read(stored: Mapping[str, StoredTensor], name: str) -> torch.Tensor:
    value = stored[name].read().float()
    return value * stored[name + _SCALES].read()[:, None] if value.ndim == 2 else value
