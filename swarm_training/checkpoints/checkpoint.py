"""One checkpoint: parameters, optimizer, scheduler and data as of one global step, in a directory of its own.

There are two layouts. A *servable* checkpoint has the files of a Hugging Face model. Its folder ``training/`` has what
else the run needs to go on, and ``averaged/`` has the moving average of the weights as a second model. A *plain*
checkpoint has the parameters of any model, under their names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from swarm_models.checkpoints import safetensors_bytes
from swarm_models.checkpoints.safetensors_file import read_header
from swarm_protocol.atomic_file import written_atomically
from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import read_object, shown
from swarm_protocol.untrusted.numbers import Expected, require_number
from swarm_training.checkpoints.flat_state import FlatState, flatten, unflatten
from swarm_training.checkpoints.model_files import ServableModel, place_of, read_model, write_model
from swarm_training.checkpoints.whole_directory import whole_directory
from swarm_training.core.moment import Moment
from swarm_training.losses.curve import LossCurve
from swarm_training.losses.drawing import draw

MODEL, OPTIMIZER, FACTS = "model.safetensors", "optimizer.safetensors", "checkpoint.json"
TRAINING, AVERAGED = "training", "averaged"  # folders of a servable checkpoint
STATE = "state.safetensors"
LOSSES, PICTURE = "losses.jsonl", "loss.svg"  # of both layouts
_MAX_LOSSES_BYTES = 4 << 20
_PLAIN_VERSION, _SERVABLE_VERSION = 1, 2
_MAX_FACTS_BYTES = 64 << 20  # with the structure of an optimizer's state: some 100 bytes for each parameter
_KINDS: Mapping[type, str] = {str: "a string", dict: "an object", list: "a list"}
_SAID = ("run", "step", "rollbacks", "data", "config")  # fields that are in the facts of both layouts
_MAX_STEP = Expected(0, 1 << 53, whole=True)


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after one global step.

    Attributes:
        step: the number of global steps taken.
        parameters: parameters and buffers, by name.
        optimizer, scheduler: their ``state_dict()``; None: there is none.
        data: JSON that says where the data of the peer that wrote the checkpoint go on; other peers have their own.
        config: JSON that says what was trained and how.
        rollbacks: how often the run had gone back before.
        compressor: the tensors that the run's compressor keeps; only a servable checkpoint has them.
        trained: the names of the trained parameters in the run's order; only a servable checkpoint has them.
        losses: the losses so far; None: they are not known.
    """

    run: str
    step: int
    parameters: Mapping[str, torch.Tensor]
    optimizer: Any = None
    scheduler: Any = None
    data: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    rollbacks: int = 0
    compressor: Mapping[str, torch.Tensor] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    losses: LossCurve | None = None

    @property
    def moment(self) -> Moment:
        """Return the moment of this state, for ``resumed_at`` of ``TrainingRun``."""
        return Moment(self.rollbacks, self.step)


def parameters_digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """Return the hexadecimal SHA-256 of names, dtypes, shapes and bytes: equal if and only if all bits are equal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(parameters.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(safetensors_bytes.data_of(tensor))
    return digest.hexdigest()


def write(checkpoint: Checkpoint, directory: Path, servable: ServableModel | None = None) -> None:
    """Write all of a checkpoint, or nothing: the directory appears once everything in it is on disk.

    ``servable``: the model whose files the checkpoint has, see above; None: the checkpoint is a plain one.

    Raises:
        ValueError: the directory exists already or cannot be written, or a state has values that cannot be written.
    """
    if flatten(checkpoint.scheduler).tensors:
        raise ValueError("the scheduler has tensors in its state: expected numbers")
    if directory.exists():
        raise ValueError(f"{directory} exists already: nothing was written")
    with whole_directory(directory) as partial:
        if servable is None:
            _write_plain(checkpoint, partial)
        else:
            _write_servable(checkpoint, servable, partial)
        if checkpoint.losses is not None:
            write_losses(checkpoint.losses, checkpoint.run, partial)


def _write_plain(checkpoint: Checkpoint, directory: Path) -> None:
    optimizer = flatten(checkpoint.optimizer)
    facts = _facts(checkpoint, _PLAIN_VERSION) | {
        "digest": parameters_digest(checkpoint.parameters),
        "optimizer_digest": parameters_digest(optimizer.tensors),
        "optimizer": optimizer.structure,
        "scheduler": flatten(checkpoint.scheduler).structure,
    }
    _save(checkpoint.parameters, directory / MODEL)
    _save(optimizer.tensors, directory / OPTIMIZER)
    (directory / FACTS).write_text(json.dumps(facts))


def _write_servable(checkpoint: Checkpoint, servable: ServableModel, directory: Path) -> None:
    """Write the model's files, and the rest of the state. Tensors of the optimizer that are in ``averaged/`` already
    are not written a second time."""
    facts = _facts(checkpoint, _SERVABLE_VERSION) | {"trained": list(checkpoint.trained)}
    facts["model"] = write_model(directory, servable, checkpoint.parameters)
    averaged = servable.averaged or {}
    if averaged:
        facts["averaged"] = write_model(directory / AVERAGED, servable, averaged)
    state = flatten(
        {
            "optimizer": checkpoint.optimizer,
            "scheduler": checkpoint.scheduler,
            "compressor": dict(checkpoint.compressor),
        }
    )
    by_place = {place_of(tensor): name for name, tensor in averaged.items()}
    known = {path: by_place.get(place_of(tensor)) for path, tensor in state.tensors.items()}
    facts["state"] = state.structure
    facts["in_averaged"] = {path: name for path, name in known.items() if name is not None}
    (directory / TRAINING).mkdir()
    rest = {path: tensor for path, tensor in state.tensors.items() if known[path] is None}
    _save(rest, directory / TRAINING / STATE)
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    facts["files"] = {path.relative_to(directory).as_posix(): _hash(path) for path in paths}
    (directory / TRAINING / FACTS).write_text(json.dumps(facts))


def _facts(checkpoint: Checkpoint, version: int) -> dict[str, Any]:
    facts = {name: getattr(checkpoint, name) for name in _SAID}
    return {"version": version, **facts, "data": dict(checkpoint.data), "config": dict(checkpoint.config)}


def _is_servable(directory: Path) -> bool:
    return (directory / TRAINING).is_dir()


def read_facts(directory: Path) -> dict[str, Any]:
    """Return the facts beside the tensors: run, step, rollbacks and more. Raise CheckpointError if they are damaged."""
    is_servable = _is_servable(directory)
    path = directory / TRAINING / FACTS if is_servable else directory / FACTS
    expected = _SERVABLE_VERSION if is_servable else _PLAIN_VERSION
    facts = read_object(path, _MAX_FACTS_BYTES)
    if facts.get("version") != expected:
        raise CheckpointError(f"{path} is of version {shown(facts.get('version'))}: expected {expected}")
    require_number(facts.get("step"), _MAX_STEP, path, "step")
    require_number(facts.setdefault("rollbacks", 0), _MAX_STEP, path, "rollbacks")
    common: dict[str, type] = {"run": str, "data": dict, "config": dict}
    others: dict[str, type] = {"files": dict, "in_averaged": dict, "trained": list}
    if not is_servable:
        others = {"digest": str, "optimizer_digest": str}
    for name, kind in (common | others).items():
        if not isinstance(facts.get(name), kind):
            raise CheckpointError(f"{path} has {name}={shown(facts.get(name))}: expected {_KINDS[kind]}")
    return facts


def read(directory: Path) -> Checkpoint:
    """Read a checkpoint, even a stranger's: no code runs, sizes are bounded, and tensors must match their digests.
    Raise CheckpointError if a file is missing or damaged; the message names the file."""
    facts = read_facts(directory)
    content = _read_servable(directory, facts) if _is_servable(directory) else _read_plain(directory, facts)
    return Checkpoint(**content, **{name: facts[name] for name in _SAID}, losses=read_losses(directory))


def _read_plain(directory: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _tensors(directory / MODEL, facts["digest"])
    optimizer = _tensors(directory / OPTIMIZER, facts["optimizer_digest"])
    return {
        "parameters": parameters,
        "optimizer": unflatten(FlatState(optimizer, facts.get("optimizer"))),
        "scheduler": unflatten(FlatState({}, facts.get("scheduler"))),
    }


def _read_servable(directory: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    files = facts["files"]
    for name, digest in files.items():
        _require_unchanged(directory, name, digest)
    tensors = _read_state(directory, facts)
    state = unflatten(FlatState(tensors, facts.get("state")))
    if not isinstance(state, dict) or not isinstance(state.get("compressor"), dict):
        raise CheckpointError(f"{directory / TRAINING / FACTS} has no state of an optimizer and a compressor")
    return {
        "parameters": read_model(directory, _in_folder(files, ""), facts.get("model")),
        **{name: state.get(name) for name in ("optimizer", "scheduler", "compressor")},
        "trained": tuple(map(str, facts["trained"])),
    }


def write_losses(losses: LossCurve, run: str, directory: Path) -> None:
    """Write the losses of a run and their picture beside checkpoints, if there are any. Raise OSError if this fails."""
    if losses.series:
        with written_atomically(directory / LOSSES) as partial:
            partial.write_text(losses.json_lines())
        with written_atomically(directory / PICTURE) as partial:
            partial.write_text(draw(losses, run), encoding="utf-8")


def read_losses(directory: Path) -> LossCurve | None:
    """Return the losses in a checkpoint; None if there are none, or if they are damaged. Training can do without."""
    path = directory / LOSSES
    try:
        return LossCurve.parse(path.read_text()) if path.stat().st_size <= _MAX_LOSSES_BYTES else None
    except (OSError, ValueError):
        return None


def _read_state(directory: Path, facts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of the optimizer and of the compressor, by path."""
    path, files = directory / TRAINING / STATE, facts["files"]
    if f"{TRAINING}/{STATE}" not in files:
        raise CheckpointError(f"{path} is not among the files of {FACTS}")
    tensors = {name: stored.read() for name, stored in read_header(path).items()}
    if not facts["in_averaged"]:
        return tensors
    averaged = read_model(directory / AVERAGED, _in_folder(files, AVERAGED), facts.get("averaged"))
    for place, name in facts["in_averaged"].items():
        if not isinstance(name, str) or name not in averaged:
            raise CheckpointError(f"{directory / AVERAGED} has no tensor {shown(name)}")
        tensors[place] = averaged[name]
    return tensors


def _in_folder(files: Collection[str], folder: str) -> list[str]:
    """Return the names of the files that lie in a folder itself."""
    return [path.name for path in map(PurePosixPath, files) if path.parent == PurePosixPath(folder)]


def _require_unchanged(directory: Path, name: str, digest: object) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"{FACTS} names a file {shown(name)}: expected one in {directory}")
    try:
        found = _hash(directory / path)
    except OSError as error:
        raise CheckpointError(f"{directory / path} cannot be read: {error.strerror}") from None
    if found != digest:
        raise CheckpointError(f"{directory / path} is damaged: its hash is not the one in {FACTS}")


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tensors(path: Path, digest: str) -> dict[str, torch.Tensor]:
    tensors = {name: stored.read() for name, stored in read_header(path).items()}
    if parameters_digest(tensors) != digest:
        raise CheckpointError(f"{path} is damaged: the digest of its tensors is not the one in {FACTS}")
    return tensors


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file, one tensor at a time. Tied weights are written twice."""
    with path.open("wb") as file:
        safetensors_bytes.write(file, tensors)
