"""One expert: a module, and the optimizer that trains it a little with every backward pass."""

from __future__ import annotations

import torch
from torch import nn

from swarm_protocol.errors import RequestRejected

_MODULE, _OPTIMIZER, _STEPS = "module.", "optimizer.", "num_steps"
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_STATE_FACTOR = 4  # most bytes of the whole state per byte of the module; with Adam's two moments, there are three
_SPARE_BYTES = 1 << 20


class Expert:
    """A module that is trained with Adam; used by one thread at a time. ``num_steps``: the number of optimizer steps,
    including those before it was loaded. It is the version of the expert's state."""

    def __init__(self, module: nn.Module, learning_rate: float, max_grad_norm: float) -> None:
        self.module = module
        self.num_steps = 0
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._optimizer = torch.optim.Adam(self._parameters, lr=learning_rate) if self._parameters else None
        self._max_grad_norm = max_grad_norm

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs, [rows, hidden]. Raise RequestRejected if they are not finite."""
        with torch.inference_mode():
            return _finite(self.module(inputs), "outputs")

    def backward(self, inputs: torch.Tensor, grad_outputs: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the inputs, [rows, hidden], with the present weights; then take an optimizer step.
        Raise RequestRejected if gradients are not finite; no step is taken."""
        inputs = inputs.clone().requires_grad_()
        with torch.enable_grad():
            outputs = self.module(inputs)
        try:
            outputs.backward(grad_outputs)
            assert inputs.grad is not None
            grad = _finite(inputs.grad, "gradients")
            norm = nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
            _finite(norm, "gradients")
            if self._optimizer is not None:
                self._optimizer.step()
                self.num_steps += 1
        finally:
            self.module.zero_grad(set_to_none=True)
        return grad

    @property
    def most_bytes(self) -> int:
        """Return the largest size of its encoded state."""
        return _SPARE_BYTES + _STATE_FACTOR * sum(int(each.nbytes) for each in self.module.state_dict().values())

    def versioned_state(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Return ``num_steps``, and ``state`` at that moment."""
        return self.num_steps, self.state()

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of its whole state, by name."""
        tensors = {_STEPS: torch.tensor(self.num_steps)}
        tensors |= {f"{_MODULE}{name}": tensor for name, tensor in self.module.state_dict().items()}
        if self._optimizer is not None:
            for number, state in self._optimizer.state_dict()["state"].items():
                tensors |= {f"{_OPTIMIZER}{number}.{name}": tensor for name, tensor in state.items()}
        return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}

    def load(self, tensors: dict[str, torch.Tensor], num_steps: int | None = None) -> None:
        """Load the tensors that ``state`` returned; a file of an older version has no ``num_steps``. Raise ValueError
        if the tensors are those of another kind of expert, not after ``num_steps``, or not finite; nothing is changed.
        """
        rest = dict(tensors)
        steps = _checked_steps(rest.pop(_STEPS, torch.tensor(0)), num_steps)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in rest.values()):
            raise ValueError("it is not finite (it contains NaN or infinity)")
        own = {name: rest.pop(f"{_MODULE}{name}", None) for name in self.module.state_dict()}
        expected = {name: (tensor.shape, tensor.dtype) for name, tensor in self.module.state_dict().items()}
        if {name: (t.shape, t.dtype) for name, t in own.items() if t is not None} != expected:
            raise ValueError("it is another kind of expert, or of another size")
        states = self._optimizer_state(rest)
        self.module.load_state_dict(own)
        if self._optimizer is not None:
            whole = self._optimizer.state_dict()
            self._optimizer.load_state_dict({**whole, "state": states})
        self.num_steps = steps

    def _optimizer_state(self, tensors: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
        """Return Adam's state by the number of the parameter. Raise ValueError if it does not fit these parameters."""
        states: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            number, _, field = name.removeprefix(_OPTIMIZER).partition(".")
            is_known = name.startswith(_OPTIMIZER) and number.isdecimal() and int(number) < len(self._parameters)
            if not is_known or not _is_of_adam(field, tensor, self._parameters[int(number)]):
                raise ValueError("the state of its optimizer is that of another kind of expert")
            states.setdefault(int(number), {})[field] = tensor
        if any(state.keys() != _ADAM for state in states.values()):
            raise ValueError("the state of its optimizer is not whole")
        return states


def _checked_steps(steps: torch.Tensor, expected: int | None) -> int:
    if steps.shape != () or steps.dtype != torch.int64 or expected not in (None, int(steps)) or steps < 0:
        raise ValueError(f"its number of steps is wrong: expected {'a count' if expected is None else expected}")
    return int(steps)


def _is_of_adam(field: str, tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    shape = torch.Size() if field == "step" else parameter.shape
    return field in _ADAM and tensor.shape == shape and not (field != "exp_avg" and tensor.min() < 0)


def _finite(tensor: torch.Tensor, what: str) -> torch.Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise RequestRejected(f"{what} of the expert are not finite: expected smaller inputs and gradients")
    return tensor
