"""A layer for the user's own model: a mixture of experts that run on servers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from swarm_protocol.process import network_loop
from swarm_training.experts.core.cells import check_grid, check_name
from swarm_training.experts.core.config import MAX_HIDDEN, MixtureConfig
from swarm_training.experts.directory.directory import ExpertCache
from swarm_training.experts.mixture.client import ExpertClient
from swarm_training.experts.mixture.dispatch import Dispatcher
from swarm_training.experts.mixture.gating import balance_loss, scores_of, weights_of
from swarm_training.experts.mixture.remote_function import expert_outputs, on_wire


class RemoteMixtureOfExperts(nn.Module):
    """A layer that sends each row to the k experts with the highest gate scores, and sums their outputs by weight.

    The gate is local, and trained locally: one linear layer for each dimension of the grid. The score of an expert is
    the sum of its coordinates' scores (product keys). The weights are the softmax over the scores of the experts that
    answered in time. Servers run the experts and train them: every backward pass makes them take an optimizer step.

    After each forward pass:

    Attributes:
        balance_loss: a scalar that is 1 if experts are used evenly, and more otherwise; add a little of it to the loss,
            0.01 for example, so that the gate does not settle on a few experts.
        cells: [rows, k, dimensions], the experts of each row; -1 where fewer are known.
        answered: [rows, k], whether each expert has answered in time.
    """

    balance_loss: torch.Tensor
    cells: torch.Tensor
    answered: torch.Tensor

    def __init__(
        self,
        hidden: int,
        grid: Sequence[int] = (32, 32),
        k: int = 4,
        *,
        name: str = "experts",
        client: ExpertClient | None = None,
        initial_peers: Sequence[str] = (),
        membership: Path | None = None,
        config: MixtureConfig | None = None,
    ) -> None:
        """Create the layer.

        Args:
            hidden: the size of a row; ``hidden``, ``grid`` and ``name`` must be the same as on the servers.
            client: a client that layers of a model share; without it, the layer makes one from ``initial_peers`` and
                ``membership``, see ``ExpertClient``, and ``close`` closes that.

        Raises:
            ValueError: an argument is out of range.
            NoSwarm: no initial peer answered.
        """
        super().__init__()
        config = config or MixtureConfig()
        if not 1 <= hidden <= MAX_HIDDEN:
            raise ValueError(f"hidden is {hidden}: expected 1 to {MAX_HIDDEN}")
        if not config.k_min <= k:
            raise ValueError(f"k is {k} and k_min {config.k_min}: expected 1 ≤ k_min ≤ k")
        self.hidden, self.grid, self.k, self.name = hidden, check_grid(grid), k, check_name(name)
        self.gates = nn.ModuleList(nn.Linear(hidden, size) for size in self.grid)
        if client is not None and (initial_peers or membership is not None):
            raise ValueError("client and initial_peers or membership: expected one of them")
        self._own_client = None if client is not None else ExpertClient(initial_peers, membership=membership)
        network = client or self._own_client
        assert network is not None
        cache = ExpertCache(network.board(name, grid, hidden), config.refresh_s, config.ban_s, time.monotonic)
        self._dispatcher = Dispatcher(name, hidden, k, cache, network.calls, config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the weighted outputs, in the shape of ``hidden_states``: […, hidden].

        Raises:
            ValueError: the shape is another.
            TrainingDiverged: a value is not finite.
            PeerUnavailable: too few experts have answered some row; in the backward pass, if no expert has answered.
            AccessDenied: the swarm is private, and the client is not a member with the role of a client, or of a
                trainer in the backward pass.
        """
        if hidden_states.shape[-1] != self.hidden or not hidden_states.is_floating_point():
            raise ValueError(
                f"the input is {list(hidden_states.shape)} of {hidden_states.dtype}: expected floating-point "
                f"numbers in […, {self.hidden}]"
            )
        rows = hidden_states.reshape(-1, self.hidden)
        scores = [gate(rows) for gate in self.gates]  # each [rows, size]
        asked = self._dispatcher.forward(
            on_wire(rows, "rows"), [on_wire(own, "scores of the gate").double().numpy() for own in scores]
        )
        answers = network_loop.run(asked)
        self.cells, self.answered = answers.cells.to(rows.device), answers.answered.to(rows.device)
        self.balance_loss = balance_loss(scores, self.cells, self.answered, answers.living)
        weights = weights_of(scores_of(self.cells, scores), self.answered)
        outputs = expert_outputs(rows, answers, self._dispatcher)
        return (weights[:, :, None] * outputs).sum(1).reshape(hidden_states.shape)

    def close(self) -> None:
        """Close what this layer has made; a client that it was given stays open, and must be closed later."""
        network_loop.run(self._dispatcher.close())
        if self._own_client is not None:
            self._own_client.close()
            self._own_client = None

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, grid={self.grid}, k={self.k}, name={self.name!r}"
