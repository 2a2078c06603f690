"""Muon (Jordan et al., 2024) for the matrices of hidden layers, with AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import ParamsT


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's ``Muon`` and ``AdamW`` with one learning rate: Muon's steps are scaled to the size of AdamW's
    (``adjust_lr_fn="match_rms_adamw"``, Liu et al., 2025).

    Muon multiplies matrices in bf16, so its steps differ in the last bits from machine to machine. Use it as the inner
    optimizer of local steps, whose results stay at one peer.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, weight_decay: float = 0.0, momentum: float = 0.95) -> None:
        """Take parameters or groups of them. Muon trains those in a group with ``is_hidden``, which are matrices. Raise
        ValueError if this version of torch has no Muon, there are no parameters, a group for Muon has a parameter that
        is no matrix, or a number is out of its range."""
        kind = getattr(torch.optim, "Muon", None)
        if kind is None:
            raise ValueError(f"torch {torch.__version__} has no Muon: expected torch 2.9 or newer")
        given: list[Any] = list(params)
        if not given:
            raise ValueError("Muon got no parameters: expected at least one that is trained")
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        groups = [{"is_hidden": False, **group} for group in groups]
        hidden = [group for group in groups if group["is_hidden"]]
        others = [group for group in groups if not group["is_hidden"]]
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._parts: list[torch.optim.Optimizer] = []
        if hidden:
            self._parts.append(kind(hidden, momentum=momentum, adjust_lr_fn="match_rms_adamw", **options))
        if others:
            self._parts.append(torch.optim.AdamW(others, **options))
        super().__init__([group for part in self._parts for group in part.param_groups], options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step with the gradients. Raises ValueError if there is a closure."""
        if closure is not None:
            raise ValueError("a closure was given: expected none, since gradients are averaged between steps")
        for part in self._parts:
            # Loading a state replaces the groups and the state of this optimizer, but not those of its parts.
            is_hidden = part.param_groups[0]["is_hidden"]
            part.param_groups = [group for group in self.param_groups if group["is_hidden"] == is_hidden]
            part.state = self.state
            part.step()


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the trained matrices for Muon: all but embeddings and the output layer, which serve single tokens."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is output]
    spared = {parameter for table in tables for parameter in table.parameters()}
    return {each for each in model.parameters() if each.requires_grad and each.dim() == 2} - spared


def split_hidden(groups: list[dict[str, Any]], hidden: set[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the groups, each divided into the hidden matrices and the rest."""
    divided = [
        {**group, "params": [each for each in group["params"] if (each in hidden) == is_hidden], "is_hidden": is_hidden}
        for group in groups
        for is_hidden in (True, False)
    ]
    return [group for group in divided if group["params"]]
