"""One checkpoint: parameters, optimizer, scheduler and data as of one global step, in a directory of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from swarm_models.checkpoints.safetensors_file import read_header
from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import read_object, shown
from swarm_protocol.untrusted.numbers import Expected, require_number
from swarm_training.checkpoints.flat_state import FlatState, flatten, unflatten
from swarm_training.checkpoints.whole_directory import whole_directory
from swarm_training.core.moment import Moment

MODEL, OPTIMIZER, FACTS = "model.safetensors", "optimizer.safetensors", "checkpoint.json"
_VERSION = 1
_MAX_FACTS_BYTES = 64 << 20  # with the structure of an optimizer's state: some 100 bytes for each parameter
_MAX_STEP = Expected(0, 1 << 53, whole=True)


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after one global step.

    Attributes:
        step: the number of global steps taken.
        parameters: parameters and buffers, by name.
        optimizer, scheduler: their ``state_dict()``; None: there is none.
        data: JSON that says where the data of the writing peer go on; other peers have their own.
        config: JSON that says what was trained and how.
        rollbacks: how often the run had gone back before.
    """

    run: str
    step: int
    parameters: Mapping[str, torch.Tensor]
    optimizer: Any = None
    scheduler: Any = None
    data: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    rollbacks: int = 0

    @property
    def moment(self) -> Moment:
        """Return the moment of this state, for ``resumed_at`` of ``TrainingRun``."""
        return Moment(self.rollbacks, self.step)


def parameters_digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """Return the hexadecimal SHA-256 of names, dtypes, shapes and bytes: equal if and only if all bits are equal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(parameters.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(checkpoint: Checkpoint, directory: Path) -> None:
    """Write all of a checkpoint, or nothing: the directory appears once everything in it is on disk.

    Raises:
        ValueError: the directory exists already or cannot be written, or a state has values that cannot be written.
    """
    optimizer, scheduler = flatten(checkpoint.optimizer), flatten(checkpoint.scheduler)
    if scheduler.tensors:
        raise ValueError("the scheduler has tensors in its state: expected numbers")
    facts = {
        "version": _VERSION,
        "run": checkpoint.run,
        "step": checkpoint.step,
        "rollbacks": checkpoint.rollbacks,
        "digest": parameters_digest(checkpoint.parameters),
        "optimizer_digest": parameters_digest(optimizer.tensors),
        "optimizer": optimizer.structure,
        "scheduler": scheduler.structure,
        "data": dict(checkpoint.data),
        "config": dict(checkpoint.config),
    }
    if directory.exists():
        raise ValueError(f"{directory} exists already: nothing was written")
    with whole_directory(directory) as partial:
        save_file(_apart(checkpoint.parameters), partial / MODEL)
        save_file(_apart(optimizer.tensors), partial / OPTIMIZER)
        (partial / FACTS).write_text(json.dumps(facts))


def read_facts(directory: Path) -> dict[str, Any]:
    """Return the facts beside the tensors: run, step, rollbacks and more. Raises CheckpointError if damaged."""
    path = directory / FACTS
    facts = read_object(path, _MAX_FACTS_BYTES)
    if facts.get("version") != _VERSION:
        raise CheckpointError(f"{path} is of version {shown(facts.get('version'))}: expected {_VERSION}")
    require_number(facts.get("step"), _MAX_STEP, path, "step")
    require_number(facts.setdefault("rollbacks", 0), _MAX_STEP, path, "rollbacks")
    for name, kind in (("run", str), ("digest", str), ("optimizer_digest", str), ("data", dict), ("config", dict)):
        if not isinstance(facts.get(name), kind):
            expected = "a string" if kind is str else "an object"
            raise CheckpointError(f"{path} has {name}={shown(facts.get(name))}: expected {expected}")
    return facts


def read(directory: Path) -> Checkpoint:
    """Read a checkpoint, even a stranger's: no code runs, sizes are bounded, and tensors must match their digests.

    Raises:
        CheckpointError: a file is missing or damaged; the message names the file.
    """
    facts = read_facts(directory)
    parameters = _tensors(directory / MODEL, facts["digest"])
    optimizer = _tensors(directory / OPTIMIZER, facts["optimizer_digest"])
    return Checkpoint(
        facts["run"],
        facts["step"],
        parameters,
        unflatten(FlatState(optimizer, facts.get("optimizer"))),
        unflatten(FlatState({}, facts.get("scheduler"))),
        facts["data"],
        facts["config"],
        facts["rollbacks"],
    )


def _tensors(path: Path, digest: str) -> dict[str, torch.Tensor]:
    tensors = {name: stored.read() for name, stored in read_header(path).items()}
    if parameters_digest(tensors) != digest:
        raise CheckpointError(f"{path} is damaged: its tensors are not those that {FACTS} has the digest of")
    return tensors


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return CPU tensors, each with memory of its own, as safetensors requires: tied weights are written twice."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        found[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    return found
