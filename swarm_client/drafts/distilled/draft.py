"""The guesses of a distilled draft, which keeps its own keys and values of the confirmed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from swarm_client.drafts.distilled.file import load_draft
from swarm_client.drafts.distilled.network import DraftNetwork
from swarm_client.speculation.draft import Draft, SteppedSession

BESIDE_MODEL = "draft.safetensors"  # in a model's directory
SLACK = 64  # positions beyond the context that are kept until old ones are dropped


class DistilledDraft(Draft):
    """A draft whose network sits between the embedding and the head of the model that it was made for."""

    num_hidden = 1

    def __init__(
        self, network: DraftNetwork, embedding: nn.Embedding, head: nn.Module, name: str, acceptance: float
    ) -> None:
        """Keep the network; ``embedding`` and ``head`` are the model's."""
        self.network, self.embedding, self.head = network, embedding, head
        self.name, self.acceptance = name, acceptance

    def begin(self) -> DistilledSession:
        return DistilledSession(self.network, self.embedding, self.head)


class DistilledSession(SteppedSession):
    """The guesses of one generation.

    All lines of guesses form one row of the network, in which each token sees the confirmed tokens and its own line.
    """

    def __init__(self, network: DraftNetwork, embedding: nn.Embedding, head: nn.Module) -> None:
        self._network, self._embedding, self._head = network, embedding, head
        self._device = next(network.parameters()).device
        self._cache = DynamicCache()
        self._length = 0  # of the text; the cache only has its end
        self._num_guessed = 0  # positions in the cache that are guesses
        self._depth = 0  # guesses in each line
        self._new_ids: list[int] = []  # confirmed, but not computed yet
        self._new_features: list[torch.Tensor] = []
        self._output = torch.empty(0)  # of the last confirmed position, [hidden_size]
        self._features = torch.empty(0)  # for the next token of each line, [rows, hidden_size]

    def confirm(self, token_ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        size = self._network.shape.model_hidden_size
        if hidden is None:
            hidden = torch.zeros(len(token_ids), size)
        assert hidden.shape == (len(token_ids), size), f"{tuple(hidden.shape)} for {len(token_ids)} tokens"
        context = self._network.shape.context
        self._new_ids += token_ids
        self._new_features.append(hidden[-context:].detach().to(self._device, torch.float32).clone())
        if len(self._new_features) > context:  # there were no guesses for a long time
            self._new_features = [torch.cat(self._new_features)[-context:]]

    @torch.inference_mode()
    def start(self, num_rows: int) -> torch.Tensor:
        if self._num_guessed:
            self._cache.crop(-self._num_guessed)
        self._num_guessed = self._depth = 0
        if self._new_ids:
            self._compute_confirmed()
        self._features = self._output.expand(num_rows, -1)
        return self._logits(self._output[None])[0]

    @torch.inference_mode()
    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        num_rows, confirmed = len(token_ids), self._cache.get_seq_length() - self._num_guessed
        positions = torch.full((1, num_rows), self._length + self._depth, device=self._device)
        mask = None
        if num_rows > 1:  # [1, 1, lines, cached and new tokens]
            # Guesses are cached depth by depth, and in each depth line by line.
            own_line = torch.eye(num_rows, dtype=torch.bool, device=self._device).repeat(1, self._depth + 1)
            mask = nn.functional.pad(own_line, (confirmed, 0), value=True)[None, None]
        output = self._run(token_ids, self._features, positions, mask)
        self._num_guessed += num_rows
        self._depth += 1
        self._features = output
        return self._logits(output)

    def _compute_confirmed(self) -> None:
        """Compute the confirmed tokens; for a long prompt, only the end that fits the draft's context."""
        context, count = self._network.shape.context, len(self._new_ids)
        ids = torch.tensor(self._new_ids[-context:])
        features = torch.cat(self._new_features)[-context:]
        if len(ids) == context:  # what is cached lies outside the context
            self._cache = DynamicCache()
        positions = torch.arange(self._length + count - len(ids), self._length + count, device=self._device)[None]
        self._output = self._run(ids, features, positions, None)[-1]
        self._length += count
        self._new_ids, self._new_features = [], []
        if self._cache.get_seq_length() > context + SLACK:
            layers: Any = self._cache.layers
            last = [(layer.keys[:, :, -context:], layer.values[:, :, -context:]) for layer in layers]
            self._cache = DynamicCache(last)

    def _run(
        self, ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the network's output, [tokens, hidden_size]."""
        embedded = self._embedding(ids.to(self._device)).float()
        states: torch.Tensor = self._network(embedded[None], features[None], self._cache, mask, positions)
        return states[0]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden.to(self._embedding.weight.dtype))
        return logits.float()


def load_distilled(path: Path, model: PreTrainedModel) -> DistilledDraft:
    """Return the draft in a file, for a model whose embedding and head are on this machine.

    Raises:
        CheckpointError: the file cannot be read, or is no draft.
        ValueError: the draft was made for another model.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{path} guesses tokens, but this model has no head that makes any")
    network, acceptance = load_draft(
        path,
        base_model=str(model.name_or_path),
        vocab_size=head.out_features,
        model_hidden_size=head.in_features,
    )
    return DistilledDraft(network.to(embedding.weight.device), embedding, head, str(path), acceptance)


def own_draft(model: PreTrainedModel) -> DistilledDraft | None:
    """Return the draft in a model's directory, such as the shipped model has; None if there is none."""
    path = Path(str(model.name_or_path)) / BESIDE_MODEL
    return load_distilled(path, model) if path.is_file() and model.get_output_embeddings() is not None else None
