"""The trained state of a peer (parameters and optimizer): as a vector of gradients, as bytes and as a digest."""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from swarm_models.checkpoints import safetensors_bytes
from swarm_training.compression.compressor import Compressor, Plain
from swarm_training.core.moment import Moment

_PARAMETER, _STATE, _COMPRESSOR = "parameter", "state", "compressor/"
_PLAIN = (bool, int, float, str, type(None))
_NO_STATE = "the state that a peer has sent is no safetensors file of a training run"


class TrainedState:
    """The parameters, optimizer and compressor of one peer. Several threads may call its methods.

    Attributes:
        moment: the run's moment: the number of rollbacks and of global steps taken.
        parameters: the parameters that need gradients.
        shapes: one text per parameter, its shape and type; peers compare them to check that they train the same model.
        common: the settings that must be equal at all peers.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        compressor: Compressor | None = None,
        common: Mapping[str, str] | None = None,
    ) -> None:
        """Check what is trained. All peers share the state of ``compressor`` and the settings in ``common``.

        Frozen parameters are not trained, but those in ``parameters`` must be bit-identical at all peers.

        Raise ValueError if there is nothing to train, or the optimizer lacks a parameter or needs a closure.
        """
        self.moment = Moment(0, 0)
        self.common = dict(common or {})
        given = list(parameters)
        self.parameters = [parameter for parameter in given if parameter.requires_grad]
        if not given:
            raise ValueError("there are no parameters: expected model.parameters(); a generator can be used only once")
        if not self.parameters:
            raise ValueError("no parameter needs a gradient: expected at least one with requires_grad=True")
        _require_all(self.parameters, optimizer)
        _require_plain_step(optimizer)
        if frozen := [parameter for parameter in given if not parameter.requires_grad]:
            self.common["frozen parameters"] = _shown_digest(frozen)
        self._optimizer = optimizer
        self._compressor = compressor or Plain()
        self._lock = threading.Lock()
        self.shapes = [f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in self.parameters]
        self.length = sum(parameter.numel() for parameter in self.parameters)
        _plain_groups(optimizer)

    @property
    def step(self) -> int:
        return self.moment.step

    @property
    def optimizer_name(self) -> str:
        return type(self._optimizer).__name__

    @property
    def model_digest(self) -> bytes:
        """Return the SHA-256 of everything that must be equal for two peers to train together."""
        facts = self.shapes, self.optimizer_name, self.common
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()

    def add_gradients(self, vector: Tensor, weight: float) -> None:
        """Add the gradients, times ``weight``, to ``vector`` ([length] float32 on the CPU), and clear the gradients."""
        at = 0
        for parameter in self.parameters:
            stop = at + parameter.numel()
            if parameter.grad is not None:
                vector[at:stop].add_(parameter.grad.detach().reshape(-1).to("cpu", torch.float32), alpha=weight)
                parameter.grad = None
            at = stop

    def apply(self, gradient: Tensor) -> None:
        """Take one step of the optimizer with this gradient, [length] float32 or float64."""
        with self._lock:
            at = 0
            for parameter in self.parameters:
                part = gradient[at : at + parameter.numel()].view(parameter.shape)
                parameter.grad = part.to(parameter.device, parameter.dtype, copy=True)
                at += parameter.numel()
            self._optimizer.step()
            self.moment = replace(self.moment, step=self.step + 1)
            for parameter in self.parameters:
                parameter.grad = None

    def digest(self) -> bytes:
        """Return the SHA-256 of everything that ``to_bytes`` contains."""
        with self._lock:
            tensors, metadata = self._contents()
            return _digest(tensors, metadata)

    def is_finite(self) -> bool:
        """Return whether parameters, optimizer state and compressor state contain neither NaN nor infinity."""
        with self._lock:
            return all(bool(torch.isfinite(tensor).all()) for tensor in self._contents()[0].values())

    def to_bytes(self) -> tuple[Moment, bytes]:
        """Return the moment, and the state as a safetensors file, which cannot contain code."""
        with self._lock:
            tensors, metadata = self._contents()
            return self.moment, safetensors_bytes.to_bytes(tensors, {"optimizer": metadata})

    def write(self, file: BinaryIO) -> None:
        """Write the bytes of ``to_bytes`` to ``file`` without a copy in memory. Raise OSError if writing fails."""
        with self._lock:
            tensors, metadata = self._contents()
            safetensors_bytes.write(file, tensors, {"optimizer": metadata})

    def load(self, moment: Moment, data: bytes) -> None:
        """Take over the state that ``to_bytes`` of another peer has returned.

        Raises:
            ValueError: the data are not a state of these parameters; nothing has been changed then.
        """
        tensors, metadata = _parsed(data)
        groups, scalars = _read_settings(metadata)
        self._check_fits(tensors, groups)
        compressed = {
            name.removeprefix(_COMPRESSOR): each for name, each in tensors.items() if name.startswith(_COMPRESSOR)
        }
        with self._lock, torch.no_grad():
            self._require_same_shapes(tensors)
            settings = [_as_were(*pair) for pair in zip(self._optimizer.param_groups, groups, strict=True)]
            self._compressor.load_state_dict(compressed)
            self.moment = moment
            for number, parameter in enumerate(self.parameters):
                parameter.copy_(tensors[f"{_PARAMETER}/{number}"])
                self._optimizer.state[parameter] = self._state_of(number, parameter, tensors, scalars)
                if not self._optimizer.state[parameter]:
                    del self._optimizer.state[parameter]
            for own, theirs in zip(self._optimizer.param_groups, settings, strict=True):
                own.update(theirs)

    def _check_fits(self, tensors: Mapping[str, Tensor], groups: Sequence[Any]) -> None:
        for number, parameter in enumerate(self.parameters):
            found = tensors.get(f"{_PARAMETER}/{number}")
            if found is None or found.shape != parameter.shape or found.dtype != parameter.dtype:
                raise ValueError(f"the state that a peer has sent does not fit parameter {number}")
        if len(groups) != len(self._optimizer.param_groups):
            raise ValueError("the state that a peer has sent has other groups of parameters than the optimizer")

    def go_to(self, moment: Moment, data: bytes | None) -> None:
        """Take over the state of a checkpoint; None means the present state. Raise ValueError as ``load`` does."""
        if data is not None:
            self.load(moment, data)
        else:
            with self._lock:
                self.moment = moment

    def _require_same_shapes(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a tensor of optimizer state has another shape than the tensor that it replaces."""
        for number, parameter in enumerate(self.parameters):
            for key, own in self._optimizer.state.get(parameter, {}).items():
                theirs = tensors.get(f"{_STATE}/{number}/{key}")
                if isinstance(own, Tensor) and theirs is not None and theirs.shape != own.shape:
                    raise ValueError(f"the state that a peer has sent does not fit {key!r} of parameter {number}")

    def _state_of(
        self, number: int, parameter: nn.Parameter, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a parameter's optimizer state. Tensors keep their device; new ones get its device, or CPU if 0-d."""
        old = self._optimizer.state.get(parameter, {})
        state: dict[str, Any] = dict(scalars.get(str(number), {}))
        prefix = f"{_STATE}/{number}/"
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                key = name.removeprefix(prefix)
                before = old.get(key)
                beside = torch.device("cpu") if tensor.dim() == 0 else parameter.device
                state[key] = tensor.to(before.device if isinstance(before, Tensor) else beside, copy=True)
        return state

    def _contents(self) -> tuple[dict[str, Tensor], str]:
        """Return all tensors by name, and the rest as JSON."""
        tensors = {f"{_PARAMETER}/{number}": each.detach().cpu() for number, each in enumerate(self.parameters)}
        tensors |= {f"{_COMPRESSOR}{name}": each.cpu() for name, each in self._compressor.state_dict().items()}
        scalars: dict[str, dict[str, Any]] = {}
        for number, parameter in enumerate(self.parameters):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{_STATE}/{number}/{key}"] = value.detach().cpu()
                elif isinstance(value, _PLAIN):
                    scalars.setdefault(str(number), {})[key] = value
                else:
                    raise ValueError(f"the optimizer keeps a {type(value).__name__} as {key!r}: expected tensors")
        return tensors, json.dumps({"groups": _plain_groups(self._optimizer), "scalars": scalars}, sort_keys=True)


def _require_all(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if a parameter is not in the optimizer."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [number for number, parameter in enumerate(parameters) if id(parameter) not in known]
    if missing:
        raise ValueError(f"parameter {missing[0]} is not in the optimizer: expected one that has all of them")


def _require_plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer's step cannot be called without arguments."""
    needed = [each.name for each in inspect.signature(optimizer.step).parameters.values() if _is_needed(each)]
    if needed:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs {', '.join(needed)}: expected an optimizer that steps with the "
            "gradients alone, since peers cannot compute the loss of all again"
        )


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _shown_digest(tensors: Iterable[Tensor]) -> str:
    """Return the beginning of a SHA-256 over shapes, dtypes and bits; tensors of the meta device have no bits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{list(tensor.shape)} {tensor.dtype}".encode())
        if not tensor.is_meta:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def digest_of(data: bytes) -> bytes:
    """Return the digest of a state that ``to_bytes`` has returned. Raise ValueError if ``data`` is not such a state."""
    tensors, metadata = _parsed(data)
    return _digest(tensors, metadata)


def _parsed(data: bytes) -> tuple[dict[str, Tensor], str]:
    try:
        tensors, metadata = safetensors_bytes.from_bytes(data)
        return tensors, metadata["optimizer"]
    except (SafetensorError, KeyError):
        raise ValueError(_NO_STATE) from None


def _read_settings(metadata: str) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the optimizer's groups, and the plain values in its state by parameter. Raise ValueError for others."""
    try:
        plain = json.loads(metadata)
        groups, scalars = plain["groups"], plain["scalars"]
        values = [value for group in groups for value in group.values()]
        plain_values = [value for state in scalars.values() for value in state.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(_NO_STATE) from None
    if not all(map(_is_setting, values)) or not all(isinstance(value, _PLAIN) for value in plain_values):
        raise ValueError(_NO_STATE)
    return list(groups), scalars


def _is_setting(value: object) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, list | tuple) and all(isinstance(each, _PLAIN) for each in value)
    )


def _digest(tensors: Mapping[str, Tensor], metadata: str) -> bytes:
    digest = hashlib.sha256(metadata.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of the optimizer's groups. Raise ValueError if a setting is not a plain value."""
    groups = []
    for group in optimizer.param_groups:
        plain = {}
        for key, value in group.items():
            if key == "params":
                continue
            value = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
            if not _is_setting(value):
                raise ValueError(f"the optimizer has a {type(value).__name__} as {key!r}: expected numbers or text")
            plain[key] = list(value) if isinstance(value, tuple) else value
        groups.append(plain)
    return groups


def _as_were(before: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group in the types of ``before``. Raise ValueError if a setting cannot have its type."""
    try:
        return {key: _as_was(before.get(key), value) for key, value in group.items() if key != "params"}
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        raise ValueError(_NO_STATE) from None


def _as_was(before: object, value: object) -> object:
    """Return ``value`` in the type of ``before``, because JSON has neither tuples nor tensors."""
    if isinstance(before, tuple) and isinstance(value, list):
        return tuple(value)
    return torch.tensor(value, dtype=before.dtype) if isinstance(before, Tensor) else value
