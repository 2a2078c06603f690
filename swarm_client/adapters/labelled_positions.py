"""A callback for trainers of TRL: the head is computed only for positions that have a label."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from transformers import TrainerCallback

_NO_LABEL = -100


class LabelledPositions(TrainerCallback):
    """Makes a trainer of TRL compute the head's logits only where a label is, which changes no loss and no gradient.

    On a CPU, TRL 1.16 computes them for the prompts and the padding of a batch, too. The head is on the client, so that
    servers wait meanwhile. Trainers of other versions, which compute the head otherwise, run as they are.

    Example::

        GRPOTrainer(model, reward, config, train_dataset=data, callbacks=[LabelledPositions()])
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        if not isinstance(inner.forward, _LabelledForward):
            inner.forward = _LabelledForward(inner, inner.forward)


class _LabelledForward:
    """The forward pass of a model that TRL has changed, which is asked for log-probabilities by ``fused_lm_head``."""

    def __init__(self, model: Any, forward: Any) -> None:
        self._model = model
        self._forward = forward
        self.__wrapped__ = forward  # so that transformers finds its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if not kwargs.get("fused_lm_head") or labels is None:
            return self._forward(*args, **kwargs)
        following = labels[:, 1:]
        is_labelled = following != _NO_LABEL
        compact = {"labels": None, "shift_labels": following[is_labelled][None]}
        with _outputs_where(self._model.base_model, is_labelled):
            output = self._forward(*args, **{**kwargs, **compact})
        for field in fields(output):
            values = getattr(output, field.name)
            if isinstance(values, torch.Tensor) and values.shape == compact["shift_labels"].shape:
                mask = is_labelled.to(values.device)  # the head may be elsewhere than the labels
                # connected to the model, even if no position has a label
                setattr(output, field.name, values.new_zeros(mask.shape).masked_scatter(mask, values))
        return output


@contextmanager
def _outputs_where(backbone: torch.nn.Module, is_kept: torch.Tensor) -> Iterator[None]:
    """Make the model without its head return one row, the hidden states of kept positions, in this context.

    Args:
        is_kept: [rows, tokens - 1], since the last position predicts nothing.
    """

    def keep(_module: Any, _args: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        return replace(output, last_hidden_state=hidden[:, :-1][is_kept.to(hidden.device)][None])

    hook = backbone.register_forward_hook(keep)
    try:
        yield
    finally:
        hook.remove()
