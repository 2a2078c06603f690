"""The trained state of a peer (parameters and optimizer): as a vector of gradients, as a file and as a digest."""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import fsum, sqrt
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from swarm_models.checkpoints import safetensors_bytes
from swarm_models.checkpoints.safetensors_file import FileTensor
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.failures import undone_on_error
from swarm_protocol.wire.codec import all_finite
from swarm_training.checkpoints.checkpoint import Checkpoint
from swarm_training.checkpoints.flat_state import load_optimizer
from swarm_training.checkpoints.state_file import NO_STATE, StateFile, no_room, temporary_file
from swarm_training.compression.compressor import Compressor, Plain
from swarm_training.core.moment import Moment
from swarm_training.numerics.reproducible import exact_sum, squared_norm
from swarm_training.optim.gradients import clear_gradients, set_gradients
from swarm_training.optim.weight_average import AVERAGE, average_of, averaged_tensors, forget_averages, update_averages

_PARAMETER, _STATE, _COMPRESSOR = "parameter", "state", "compressor/"
_CLIP_EPSILON = 1e-6  # that of torch.nn.utils.clip_grad_norm_
_PLAIN = (bool, int, float, str, type(None))  # the types of settings that JSON can carry


class TrainedState:
    """The parameters, optimizer and compressor of one peer. Several threads may call its methods.

    Attributes:
        moment: the run's moment: the number of rollbacks and of global steps taken.
        parameters: the parameters that need gradients.
        shared_parameters: the values of ``parameters`` that all peers have. They are copies in CPU memory if the
            parameters drift from them, else the parameters themselves.
        shapes: the shape and type of each parameter, as text. Peers compare these to check that they train the same
            model.
        common: the settings that must be equal at all peers.
        max_norm: the norm to which averaged gradients are clipped; 0: they are not clipped.
        average_decay: the decay of the moving average of the weights; 0: there is no such average.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        compressor: Compressor | None = None,
        common: Mapping[str, str] | None = None,
        max_norm: float = 0.0,
        drifts: bool = False,
        average_decay: float = 0.0,
    ) -> None:
        """Check what is trained. All peers share the state of ``compressor`` and the settings in ``common``.
        ``drifts``: whether the caller changes the parameters between two calls of ``apply``, by local steps.

        Frozen parameters are not trained, but those in ``parameters`` must be bit-identical at all peers.

        Raise ValueError if there is nothing to train, or the optimizer lacks a parameter or needs a closure.
        """
        self.moment = Moment(0, 0)
        self.common = dict(common or {})
        self.max_norm = max_norm
        self.average_decay = average_decay
        given = list(parameters)
        self.parameters = [parameter for parameter in given if parameter.requires_grad]
        if not given:
            raise ValueError("there are no parameters: expected model.parameters(); a generator can be used only once")
        if not self.parameters:
            raise ValueError("no parameter needs a gradient: expected at least one with requires_grad=True")
        require_steps(optimizer, self.parameters)
        if frozen := [parameter for parameter in given if not parameter.requires_grad]:
            self.common["frozen parameters"] = _shown_digest(frozen)
        self._optimizer = optimizer
        self._compressor = compressor or Plain()
        self._lock = threading.Lock()
        self.shared_parameters: Sequence[Tensor] = self.parameters
        self._copies: list[tuple[Tensor, nn.Parameter]] = []
        if drifts:
            self.shared_parameters = [parameter.detach().cpu().clone() for parameter in self.parameters]
            self._copies = list(zip(self.shared_parameters, self.parameters, strict=True))
        self.shapes = [f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in self.parameters]
        self.length = sum(parameter.numel() for parameter in self.parameters)
        if not average_decay:  # the caller may have loaded the optimizer of a run that had averages
            forget_averages(optimizer)
        _plain_groups(optimizer)  # raises if a setting of the optimizer cannot travel

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
        for parameter, (start, stop) in self._spans():
            if parameter.grad is not None:
                vector[start:stop].add_(parameter.grad.detach().reshape(-1).to("cpu", torch.float32), alpha=weight)
        clear_gradients(self.parameters)

    def squared_norm(self, gradient: Tensor, without: Collection[tuple[int, int]] = ()) -> tuple[float, ...]:
        """Return a gradient's squared norm without rounding it, as ``exact_sum`` does: all peers have the same bits.

        ``gradient``: [length] float32 or float64. ``without``: (start, stop) of parameters that do not count.
        """
        spans = (span for _, span in self._spans() if span not in without)
        return exact_sum(squared_norm(gradient[start:stop]) for start, stop in spans)

    def apply(self, gradient: Tensor, squared_norm: float | None = None) -> None:
        """Take one step of the optimizer from the shared parameters, with the gradient clipped to ``max_norm`` as
        ``torch.nn.utils.clip_grad_norm_`` does. If the norm is not finite, all finite elements become 0.

        ``gradient``: [length] float32 or float64. ``squared_norm``: that of a larger gradient, of which this one is a
        part; None: that of this gradient counts.
        """
        scale = 1.0
        if self.max_norm:
            own = fsum(self.squared_norm(gradient)) if squared_norm is None else squared_norm
            scale = min(1.0, self.max_norm / (sqrt(own) + _CLIP_EPSILON))
        with self._lock:
            self.restore()  # discards the local steps: the gradient is their mean over all peers
            self.set_gradients(gradient, scale)
            self._optimizer.step()
            if self.average_decay:
                update_averages(self._optimizer, self.parameters, self.average_decay)
            self._share()
            self.moment = replace(self.moment, step=self.step + 1)
            clear_gradients(self.parameters)

    def set_gradients(self, gradient: Tensor, scale: float = 1.0) -> None:
        """Give each parameter its part of ``gradient``, [length] float32 or float64, times ``scale``."""
        set_gradients(self.parameters, (self._part_of(gradient, *each, scale) for each in self._spans()))

    @staticmethod
    def _part_of(gradient: Tensor, parameter: nn.Parameter, span: tuple[int, int], scale: float) -> Tensor:
        """Return the part of a whole gradient that is for this parameter, times ``scale``. It is a view where device,
        dtype and scale allow it, because nobody reads the gradient later."""
        part = gradient[slice(*span)].view(parameter.shape)
        return (part if scale == 1.0 else part * scale).to(parameter.device, parameter.dtype)

    @torch.no_grad()
    def drift(self) -> Tensor:
        """Return the shared parameters minus the present ones, [length] float32 on the CPU."""
        found, at = torch.zeros(self.length), 0
        for shared, own in self._copies:
            difference = _wide(shared) - _wide(own.cpu())  # not 0 where bfloat16 would round it to 0
            found[at : at + own.numel()] = difference.reshape(-1)
            at += own.numel()
        return found

    @torch.no_grad()
    def restore(self, drift: Tensor | None = None) -> None:
        """Set the parameters to the shared ones, minus ``drift`` if it is given: a vector as ``drift()`` returns it."""
        at = 0
        for shared, own in self._copies:
            part = None if drift is None else drift[at : at + own.numel()].view(own.shape)
            own.copy_(shared if part is None else _wide(shared) - part)
            at += own.numel()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the parameters to the shared ones while the context is active."""
        with _kept([own for _, own in self._copies]):
            self.restore()
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Set the parameters to their moving averages while the context is active. Before the first step, these are the
        shared parameters. The state that other peers get does not change. Raise ValueError if there is no average."""
        if not self.average_decay:
            raise ValueError("the run has no average of its weights: expected average_decay in its settings, as 0.999")
        shared, copies = self.shared_parameters, self._copies
        try:
            with _kept(self.parameters) as before:
                with self._lock, torch.no_grad():
                    if shared is self.parameters:
                        self.shared_parameters = before
                        self._copies = list(zip(before, self.parameters, strict=True))
                    self.restore()
                    for own in self.parameters:
                        if (average := average_of(self._optimizer, own)) is not None:
                            own.copy_(average)
                yield
        finally:
            with self._lock:
                self.shared_parameters, self._copies = shared, copies

    def averaged_tensors(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Return ``model.state_dict()`` with the moving averages of the parameters; None if there are none."""
        return averaged_tensors(self._optimizer, model)

    @torch.no_grad()
    def _share(self) -> None:
        """Take the present parameters as those that all peers share."""
        for shared, own in self._copies:
            shared.copy_(own)

    def _spans(self) -> Iterator[tuple[nn.Parameter, tuple[int, int]]]:
        """Yield each parameter, and where its elements are in a vector of all: (start, stop)."""
        stop = 0
        for parameter in self.parameters:
            start, stop = stop, stop + parameter.numel()
            yield parameter, (start, stop)

    def digest(self) -> bytes:
        """Return the SHA-256 of everything that ``snapshot`` contains."""
        with self._lock:
            tensors, metadata = self._contents()
            return _digest(sorted(tensors.items()), metadata)

    def is_finite(self) -> bool:
        """Return whether parameters, optimizer state and compressor state contain neither NaN nor infinity."""
        with self._lock:
            return all(map(all_finite, self._contents()[0].values()))

    def measured(self) -> tuple[Moment, int]:
        """Return the moment, and the size in bytes of what ``snapshot`` writes then."""
        with self._lock:
            tensors, metadata = self._contents()
            return self.moment, safetensors_bytes.size_bytes(tensors, {"optimizer": metadata})

    def snapshot(self, waits: bool = True) -> tuple[Moment, StateFile]:
        """Return the moment, and the state in a temporary safetensors file, which cannot contain code. ``waits``:
        whether the next step waits until the file is written. Raise SwarmError if the file cannot be written, or
        PeerUnavailable if the state has changed because a step did not wait."""
        file = temporary_file()
        with undone_on_error(file.close):
            try:
                moment = self.write(file) if waits else self._write_beside(file)
                return moment, StateFile(file)
            except OSError as error:
                raise no_room(error) from None

    def write(self, file: BinaryIO) -> Moment:
        """Write the content of ``snapshot`` to ``file``, one tensor at a time, and return the moment. Raise OSError if
        writing fails."""
        with self._lock:
            tensors, metadata = self._contents()
            safetensors_bytes.write(file, tensors, {"optimizer": metadata})
            return self.moment

    def _write_beside(self, file: BinaryIO) -> Moment:
        """Write the state without the lock, except while one tensor is copied: disks can be slow."""

        def value_of(tensor: Tensor) -> Tensor:
            with self._lock:
                # The other tensors may have been copied before a step, or before `averaged` replaced the parameters.
                if self.moment != moment or self.shared_parameters is not shared:
                    raise PeerUnavailable("the run has gone on; ask again")
                return tensor.detach().to("cpu", copy=True)

        with self._lock:
            moment, shared = self.moment, self.shared_parameters
            tensors, metadata = self._contents()
        safetensors_bytes.write(file, tensors, {"optimizer": metadata}, value_of)
        return moment

    def load(self, moment: Moment, data: StateFile) -> None:
        """Take over the state of another peer's ``snapshot``, one tensor at a time.

        Raises:
            ValueError: the data are not a state of these parameters; nothing has been changed then.
            UnreadableState: the file can no longer be read. A part of the state may have been taken over then, with the
                moment unchanged, so the caller must not go on with this mixture of two states.
        """
        tensors, metadata = data.header()
        groups, scalars = _read_settings(metadata)
        self._check_fits(tensors, groups)
        compressed = {
            name.removeprefix(_COMPRESSOR): data.tensor(each)
            for name, each in tensors.items()
            if name.startswith(_COMPRESSOR)
        }
        with self._lock, torch.no_grad():
            self._require_same_shapes(tensors)
            settings = [_as_were(*pair) for pair in zip(self._optimizer.param_groups, groups, strict=True)]
            # The last call that may raise ValueError, and it raises before it changes anything.
            self._compressor.load_state_dict(compressed)
            for number, parameter in enumerate(self.parameters):
                parameter.copy_(data.tensor(tensors[f"{_PARAMETER}/{number}"]))
                self._load_optimizer(number, parameter, data, tensors, scalars)
            self._share()
            for own, theirs in zip(self._optimizer.param_groups, settings, strict=True):
                own.update(theirs)
            self.moment = moment

    def checkpoint(self, run: str, model: nn.Module) -> Checkpoint:
        """Return the shared state as a checkpoint of a model that has the parameters. Its tensors are those in use,
        which change with the next step. Raise ValueError if a parameter is not in the model."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        missing = [number for number, parameter in enumerate(self.parameters) if id(parameter) not in names]
        if missing:
            raise ValueError(f"parameter {missing[0]} of the run is not in the model: expected the model of the run")
        return Checkpoint(
            run,
            self.step,
            model.state_dict(),
            self._optimizer.state_dict(),
            rollbacks=self.moment.rollbacks,
            compressor=self._compressor.state_dict(),
            trained=tuple(names[id(parameter)] for parameter in self.parameters),
        )

    def restart(
        self, moment: Moment, parameters: Sequence[Tensor], optimizer: Any, compressor: Mapping[str, Tensor]
    ) -> None:
        """Take over the content of a ``checkpoint``: the parameters, and the ``state_dict()`` of optimizer and
        compressor. Raise ValueError if it is of other parameters, or of another kind of optimizer or compressor."""
        shapes = [(each.shape, each.dtype) for each in parameters]
        if shapes != [(each.shape, each.dtype) for each in self.parameters]:
            raise ValueError("the checkpoint is of other parameters")
        with self._lock, torch.no_grad():
            try:
                load_optimizer(self._optimizer, optimizer)
            except (KeyError, TypeError, AttributeError, RuntimeError):
                raise ValueError("the checkpoint is of another optimizer") from None
            if not self.average_decay:
                forget_averages(self._optimizer)
            if compressor:  # `swarm train join` does not keep it
                self._compressor.load_state_dict(compressor)
            for own, saved in zip(self.parameters, parameters, strict=True):
                own.copy_(saved)
            self._share()
            self.moment = moment

    def _check_fits(self, tensors: Mapping[str, FileTensor], groups: Sequence[Any]) -> None:
        for number, parameter in enumerate(self.parameters):
            found = tensors.get(f"{_PARAMETER}/{number}")
            if found is None or found.shape != parameter.shape or found.dtype != parameter.dtype:
                raise ValueError(f"the state does not fit parameter {number}")
        if len(groups) != len(self._optimizer.param_groups):
            raise ValueError("the state has other groups of parameters than the optimizer")

    def go_to(self, moment: Moment, data: StateFile | None) -> None:
        """Take over the state of a checkpoint; None means the present state. Raise ValueError as ``load`` does."""
        if data is not None:
            self.load(moment, data)
        else:
            with self._lock:
                self.restore()
                self.moment = moment

    def _require_same_shapes(self, tensors: Mapping[str, FileTensor]) -> None:
        """Raise ValueError if a tensor of optimizer state has another shape than the tensor that it replaces."""
        for number, parameter in enumerate(self.parameters):
            for key, own in self._optimizer.state.get(parameter, {}).items():
                theirs = tensors.get(f"{_STATE}/{number}/{key}")
                if isinstance(own, Tensor) and theirs is not None and theirs.shape != own.shape:
                    raise ValueError(f"the state does not fit {key!r} of parameter {number}")

    def _load_optimizer(
        self,
        number: int,
        parameter: nn.Parameter,
        data: StateFile,
        tensors: Mapping[str, FileTensor],
        scalars: Mapping[str, Any],
    ) -> None:
        """Load a parameter's optimizer state. A tensor goes to the device of the tensor that it replaces. A new tensor
        goes to the parameter's device, or to the CPU if it is 0-d, as the ``step`` of torch's optimizers is."""
        old = self._optimizer.state.pop(parameter, {})
        state: dict[str, Any] = dict(scalars.get(str(number), {}))
        prefix = f"{_STATE}/{number}/"
        for name, entry in tensors.items():
            if name.startswith(prefix):
                key = name.removeprefix(prefix)
                if key == AVERAGE and not self.average_decay:
                    continue  # the run had an average of its weights before it was started again without one
                before = old.pop(key, None)
                beside = torch.device("cpu") if not entry.shape else parameter.device
                device = before.device if isinstance(before, Tensor) else beside
                del before  # its memory is free before the new one takes some
                state[key] = data.tensor(entry).to(device)
        if state:
            self._optimizer.state[parameter] = state

    def _contents(self) -> tuple[dict[str, Tensor], str]:
        """Return all tensors by name, on their devices and not copied, and the rest as JSON."""
        tensors = {f"{_PARAMETER}/{number}": each.detach() for number, each in enumerate(self.shared_parameters)}
        tensors |= {f"{_COMPRESSOR}{name}": each for name, each in self._compressor.state_dict().items()}
        scalars: dict[str, dict[str, Any]] = {}
        for number, parameter in enumerate(self.parameters):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{_STATE}/{number}/{key}"] = value.detach()
                elif isinstance(value, _PLAIN):
                    scalars.setdefault(str(number), {})[key] = value
                else:
                    raise ValueError(f"the optimizer keeps a {type(value).__name__} as {key!r}: expected tensors")
        return tensors, json.dumps({"groups": _plain_groups(self._optimizer), "scalars": scalars}, sort_keys=True)


def require_steps(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Raise ValueError if a parameter is not in the optimizer, or its step cannot be called without arguments."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [number for number, parameter in enumerate(parameters) if id(parameter) not in known]
    if missing:
        raise ValueError(f"parameter {missing[0]} is not in the optimizer: expected one that has all of them")
    needed = [each.name for each in inspect.signature(optimizer.step).parameters.values() if _is_needed(each)]
    if needed:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs {', '.join(needed)}: expected an optimizer that steps with the "
            "gradients alone, since peers cannot compute the loss over the whole batch again"
        )


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


@contextmanager
def _kept(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Give the parameters back their present values, which are yielded, at the end of the context."""
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        yield before
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _shown_digest(tensors: Iterable[Tensor]) -> str:
    """Return the beginning of a SHA-256 over shapes, dtypes and bits, short enough for an error message. Tensors of the
    meta device have no bits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{list(tensor.shape)} {tensor.dtype}".encode())
        if not tensor.is_meta:
            digest.update(safetensors_bytes.data_of(tensor))
    return digest.hexdigest()[:16]


def digest_of(data: StateFile) -> bytes:
    """Return the digest of a state. Raise ValueError if ``data`` is not such a state, UnreadableState if the
    disk fails."""
    tensors, metadata = data.header()
    return _digest(((name, data.tensor(entry)) for name, entry in sorted(tensors.items())), metadata)


def require_finite(data: StateFile) -> None:
    """Raise ValueError unless ``data`` is a state whose numbers are all finite."""
    if not all(all_finite(data.tensor(entry)) for entry in data.header()[0].values()):
        raise ValueError("it has numbers that are not finite")


def _read_settings(metadata: str) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the optimizer's groups, and the plain values in its state by parameter. Raise ValueError for others."""
    try:
        plain = json.loads(metadata)
        groups, scalars = plain["groups"], plain["scalars"]
        values = [value for group in groups for value in group.values()]
        plain_values = [value for state in scalars.values() for value in state.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(NO_STATE) from None
    if not all(map(_is_setting, values)) or not all(isinstance(value, _PLAIN) for value in plain_values):
        raise ValueError(NO_STATE)
    return list(groups), scalars


def _is_setting(value: object) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, list | tuple) and all(isinstance(each, _PLAIN) for each in value)
    )


def _digest(tensors: Iterable[tuple[str, Tensor]], metadata: str) -> bytes:
    """Return the SHA-256 of named tensors on any device, which come in the order of their names."""
    digest = hashlib.sha256(metadata.encode())
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(safetensors_bytes.data_of(tensor))
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
        raise ValueError(NO_STATE) from None


def _as_was(before: object, value: object) -> object:
    """Return ``value`` in the type of ``before``, because JSON has neither tuples nor tensors."""
    if isinstance(before, tuple) and isinstance(value, list):
        return tuple(value)
    return torch.tensor(value, dtype=before.dtype) if isinstance(before, Tensor) else value
