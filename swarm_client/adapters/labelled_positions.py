"""A callback for trainers of TRL, with which the head is computed only for positions that have a label."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from transformers import TrainerCallback

_NO_LABEL = -100


class LabelledPositions(TrainerCallback):
    """A callback that makes a trainer of TRL compute the head's logits only where a label is. The loss stays the same.

    On a CPU, TRL 1.16 also computes the logits of a batch's prompts and padding. The head is on the client, and servers
    wait meanwhile. Trainers of other versions of TRL compute the head otherwise and are not changed.

    Example::

        GRPOTrainer(model, reward, config, train_dataset=data, callbacks=[LabelledPositions()])
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        # A wrapper of PEFT calls the forward pass of the model inside.
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        if not isinstance(inner.forward, _LabelledForward):
            inner.forward = _LabelledForward(inner, inner.forward)


class _LabelledForward:
    """The forward pass of a model that TRL has changed. The argument ``fused_lm_head`` asks for log-probabilities."""

    def __init__(self, model: Any, forward: Any) -> None:
        self._model = model
        self._forward = forward
        self.__wrapped__ = forward  # so that transformers finds its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if not kwargs.get("fused_lm_head") or labels is None:
            return self._forward(*args, **kwargs)
        following = labels[:, 1:]  # [rows, tokens - 1]: the logits of a position predict the next label
        is_labelled = following != _NO_LABEL
        compact = {"labels": None, "shift_labels": following[is_labelled][None]}
        with _outputs_where(self._model.base_model, is_labelled):
            output = self._forward(*args, **{**kwargs, **compact})
        for field in fields(output):
            values = getattr(output, field.name)
            if isinstance(values, torch.Tensor) and values.shape == compact["shift_labels"].shape:
                mask = is_labelled.to(values.device)  # the head may be on another device than the labels
                # ``masked_scatter`` connects the result to the model's graph even if no position has a label.
                setattr(output, field.name, values.new_zeros(mask.shape).masked_scatter(mask, values))
        return output


@contextmanager
def _outputs_where(backbone: torch.nn.Module, is_kept: torch.Tensor) -> Iterator[None]:
    """Make the model without its head return one row in this context: the hidden states of the kept positions.

    Args:
        is_kept: [rows, tokens - 1], because the last position predicts nothing.
    """

    def keep(_module: Any, _args: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        return replace(output, last_hidden_state=hidden[:, :-1][is_kept.to(hidden.device)][None])

    hook = backbone.register_forward_hook(keep)
    try:
        yield
    finally:
        hook.remove()
