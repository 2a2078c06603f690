"""The hidden states from which a model predicts tokens. Some drafts need them."""

from __future__ import annotations

import threading
from typing import Any

import torch


class HeadInput:
    """The last input of the model's head in this thread. An instance is a context manager."""

    def __init__(self, model: Any, is_wanted: bool) -> None:
        self._head = model.get_output_embeddings() if is_wanted else None
        self._thread = threading.get_ident()
        self._last: torch.Tensor | None = None

    def of_row(self, row: int) -> torch.Tensor | None:
        """Return the input of one row, [positions, hidden_size] float32; None if it is not wanted."""
        return None if self._last is None else self._last[row].float()

    def __enter__(self) -> HeadInput:
        if self._head is not None:
            self._handle = self._head.register_forward_pre_hook(self._keep)
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._head is not None:
            self._handle.remove()

    def _keep(self, _head: Any, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == self._thread:  # generations of other threads use the same head
            self._last = args[0].detach()
