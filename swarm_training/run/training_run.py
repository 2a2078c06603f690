"""``TrainingRun``, with which any training loop trains one model together with other peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swarm_protocol.failures import Closing, undone_on_error
from swarm_protocol.process import network_loop
from swarm_training.checkpoints.model_files import ServableModel, is_servable
from swarm_training.compression.compressor import Compressor
from swarm_training.core.config import TrainingConfig, check_run_name
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.evaluation.policy import EvaluationHistory, steps_to_keep
from swarm_training.ledger.ledger import UserTotal
from swarm_training.ledger.orders import ModeratorOrder
from swarm_training.optim.local_steps import LocalSteps, outer_optimizer
from swarm_training.progress import policy
from swarm_training.run.options import RunOptions
from swarm_training.run.presence import PeerProcess
from swarm_training.run.saving import load_newest, save, save_servable
from swarm_training.run.share import PeerCalls, make_share
from swarm_training.run.state import TrainedState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainingRun(Closing):
    """One peer's membership in a run.

    After ``loss.backward()``, call ``step(samples)``, which takes the gradients. Once all peers together have the
    target batch, the gradients are averaged, weighted by samples. All peers then take the same step, so that their
    parameters stay bit-identical. ``loss`` must be a mean over the samples. Do not call the optimizer's own ``step``
    or ``zero_grad``.

    With ``local`` each peer takes steps of its own. After the target batch, the peers average how far these steps have
    moved their parameters. In between, parameters differ; ``shared_parameters`` gives those that are common to all.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        target_batch_size: int,
        initial_peers: Sequence[str] = (),
        config: TrainingConfig | None = None,
        options: RunOptions | None = None,
        **keywords: Any,
    ) -> None:
        """Join the run through ``initial_peers`` and load its state, or found the run if there are none.

        Further options come from ``RunOptions``, or from the keywords with the names of its fields, such as ``local``
        or ``resume``. ``RunOptions`` explains them.

        Args:
            name: the run's name, the same for all peers.
            parameters: the model's parameters, or only the trained ones. Frozen parameters in this list must be
                bit-identical at all peers. Each peer has its own buffers, such as a BatchNorm's means.
            optimizer: an optimizer that has all trained parameters and steps without a closure. With ``local`` it is
                the outer optimizer, and None stands for ``SGD(lr=1.0)``, which sets the parameters to the mean of all
                peers' parameters.
            target_batch_size: the number of samples of all peers together between two global steps.
            options, keywords: the options; a keyword replaces the field of ``options``.

        Raises:
            ValueError: an argument makes training impossible, or the peers of the run train another model.
            CheckpointError: all checkpoints in ``resume`` are damaged.
            NoSwarm, PeerUnavailable: no initial peer answered, or none of them trains this run.
            UnreadableState: as for ``step``.
        """
        check_run_name(name)
        self._name = name
        options, config = replace(options or RunOptions(), **keywords), config or TrainingConfig()
        _check_start(target_batch_size, initial_peers, config)
        config, compression = options.completed(config), options.compression
        evaluation, resumed_at = options.evaluation, options.resumed_at
        parameters = list(parameters)
        options.check_local(parameters, config, target_batch_size)
        self._state = _state_of(parameters, optimizer, config, options.local, compression.compressor)
        if evaluation is not None:
            evaluation.bind(self._state.parameters)
        if options.resume is not None:
            resumed_at = load_newest(self._state, Path(options.resume))
        membership = options.membership(initial_peers)
        self._presence = network_loop.run(
            PeerProcess.enter(name, target_batch_size, membership, config, self._state, compression)
        )
        self._share = make_share(self._presence.peer, self._state, config, options.local, evaluation)
        self._max_norm, self._evaluation = config.max_norm, config.evaluation
        self._using = threading.Lock()
        self._is_closed = False
        with undone_on_error(self.close):
            earlier = EvaluationHistory.of(() if evaluation is None else evaluation.earlier)
            if initial_peers:
                self._join(config.join_timeout_s, resumed_at, earlier)
            else:
                self._drive(self._share.found(resumed_at, self.initial_peers, earlier))

    @property
    def initial_peers(self) -> list[str]:
        """Return multiaddrs through which other peers can join."""
        return self._presence.addresses

    @property
    def peer_id(self) -> str:
        return self._presence.peer.own.peer_id

    @property
    def num_steps(self) -> int:
        """Return the number of global steps that the run has taken, including steps before this peer joined."""
        return self._state.step

    @property
    def num_rollbacks(self) -> int:
        """Return how often the run has gone back to a checkpoint, which sets ``num_steps`` to the checkpoint's step."""
        return self._state.moment.rollbacks

    @property
    def went_back_to(self) -> int:
        """Return the step of the checkpoint that the run went back to last; 0 before the first rollback."""
        return self._presence.peer.rollbacks.went_back_to

    @property
    def max_norm(self) -> float:
        """Return the norm to which averaged gradients, or those of local steps, are clipped; 0: none are clipped."""
        return self._max_norm

    @property
    def last_group(self) -> list[str]:
        """Return the ids of the peers whose gradients were averaged last, in the order of the sum."""
        return list(self._share.last_group)

    @property
    def last_batch_size(self) -> int:
        """Return the number of samples in the last average, usually at least the target: peers finish begun samples."""
        return self._share.last_batch_size

    @property
    def last_loss(self) -> float | None:
        """Return the mean loss before the last step, over the samples of its average for which peers have reported a
        loss; None: no peer has. All peers of an average return the same number."""
        return self._share.last_loss

    @property
    def records(self) -> tuple[Progress, ...]:
        """Return the newest record of each peer that has been heard from recently, with this peer's own first."""
        return network_loop.call(self._presence.peer.view).all

    @property
    def bans(self) -> dict[str, ModeratorOrder]:
        """Return the moderators' bans that are in force now, by peer id."""
        return network_loop.call(self._presence.peer.bans)

    @property
    def seconds_to_step(self) -> float | None:
        """Return the estimated seconds until the next global step; None while no peer has measured its speed."""
        return policy.seconds_to_step(network_loop.call(self._presence.peer.view))

    @property
    def num_peers(self) -> int:
        """Return the number of peers that have been heard from recently, including this one."""
        return len(self.records)

    @property
    def evaluations(self) -> EvaluationHistory:
        """Return the losses on held-out data that are known, by the steps after which they were computed."""
        return network_loop.run(self._presence.peer.evaluations())

    @property
    def reason_of_end(self) -> str:
        """Return why the run has ended, for all peers at this step; empty while it goes on. See ``Evaluation``."""
        return network_loop.call(lambda: self._presence.peer.reason_of_end)

    @property
    def ledger(self) -> dict[str, UserTotal]:
        """Return samples and rounds by user, most samples first, for all known steps. Contributions are signed by their
        peers and countersigned by leaders. A user is the name in a token, or the peer id if there is no organiser."""
        return network_loop.call(self._presence.peer.ledger.totals)

    def step(self, samples: int, loss: float | None = None) -> None:
        """Take the gradients, which must be a mean over ``samples`` samples, and take a local step with them if there
        are local steps. If the batch is complete, block while the peers average, unless ``delay`` is on.

        ``loss`` is the mean over the same samples. Observers of the run see it, and peers conclude from it that the run
        has diverged.

        Raises:
            ValueError: ``samples`` is less than 1, or the run is closed or has ended (``reason_of_end``).
            AccessDenied: a moderator has banned this peer, or other peers have excluded it for wrong results.
            UnreadableState: the disk has failed while the run's state was taken over, a part of which is in the model.
        """
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ValueError(f"samples is {samples!r}: expected a whole number of at least 1")
        if self._is_closed:
            raise ValueError("the run is closed")
        if self._presence.peer.own.has_ended:
            raise ValueError(f"the run has ended at step {self.num_steps}: {self.reason_of_end}")
        with self._using:
            self._share.add(samples, loss)
            self._drive(self._share.report())

    def save(
        self,
        directory: str | Path,
        keep: int = 3,
        model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Path:
        """Write parameters, optimizer state and compressor state as of the last global step into a directory, which is
        for this run alone; return the path of the new checkpoint. The newest ``keep`` checkpoints stay, and so does the
        one with the lowest loss on held-out data. ``resume`` of ``RunOptions`` loads them.

        Call this between two calls of ``step``, also inside ``averaged()``: the model gets the run's parameters for the
        time of the call. A process that is killed meanwhile leaves the older checkpoints intact.

        Args:
            model: the model of transformers that has the parameters. The checkpoint is then a folder that transformers
                and servers load as a model, with the rest in its folder ``training``, and the moving average of the
                weights as a second model in ``averaged``, if there is one. Without ``model`` it is a file.
            tokenizer: the tokenizer whose files are written into the folder; None: there is none.

        Raises:
            ValueError: ``keep`` is less than 1, the directory cannot be written, or the model is not that of the run or
                not one that transformers writes.
            CheckpointError: the directory has checkpoints of another run.
        """
        spared = steps_to_keep(self._evaluation, self.evaluations, self.num_steps)
        with self._using:
            if model is None:
                return save(self._state, self.went_back_to, Path(directory), keep, spared)
            if not is_servable(model):
                raise ValueError(
                    f"model is a {type(model).__name__}: expected a PreTrainedModel of transformers with all of its "
                    "weights, or no model"
                )
            with self._state.restored():
                content = self._state.checkpoint(self._name, model)
                servable = ServableModel(model, tokenizer, self._state.averaged_tensors(model))
                return save_servable(content, servable, self.went_back_to, Path(directory), keep, spared)

    def finish(self) -> None:
        """Wait until no loss on held-out data is missing that some peer can still compute. Call this before ``close``
        when training is over."""
        network_loop.run(self._presence.peer.evaluator.settled())

    def close(self) -> None:
        """Leave the run, and withdraw what has been accumulated since the last global step, local steps too."""
        if not self._is_closed:
            self._is_closed = True
            try:
                network_loop.run(self._presence.leave())
            finally:
                self._state.restore()

    def shared_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the parameters that all peers share, for evaluating or saving it.
        The model's own parameters differ from these between two global steps of a run with local steps. Do not call
        ``step`` inside."""
        return self._state.restored()

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the moving average of its weights, for evaluating or saving it. Do
        not call ``step`` inside. Entering it raises ValueError if ``average_decay`` of the config is 0."""
        return self._state.averaged()

    def _join(self, timeout_s: float, resumed_at: Moment | None, earlier: EvaluationHistory) -> None:
        """Load the state of the run. Before, offer the own state if the run starts again: that of ``resumed_at``."""
        peer = self._presence.peer
        if resumed_at is not None:
            network_loop.run(peer.offer_state(resumed_at, self._state.digest(), earlier))
        deadline_s = time.monotonic() + timeout_s
        while not peer.own.state_digest:
            self._drive(self._share.load())
            if time.monotonic() > deadline_s and not peer.own.state_digest:
                raise peer.downloads.no_state()
        network_loop.call(peer.withdraw_offers)

    def _drive(self, calls: PeerCalls) -> None:
        """Run each coroutine that ``calls`` yields on the network loop, and send its result back to ``calls``."""
        answer: Any = None
        try:
            while True:
                answer = network_loop.run(calls.send(answer))
        except StopIteration:
            return
        finally:
            calls.close()


def _state_of(
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    config: TrainingConfig,
    local: LocalSteps | None,
    compressor: Compressor,
) -> TrainedState:
    """Return the state that is trained. Raise ValueError if it has no optimizer, or one of other parameters."""
    common, max_norm = config.common, config.max_norm
    if local is not None:
        common |= local.common
        optimizer = optimizer or outer_optimizer(parameters)
        max_norm = 0.0  # the gradient of each local step is clipped, not the sum of the steps
    if optimizer is None:
        raise ValueError("optimizer is missing: expected one, since there are no local steps")
    drifts, decay = local is not None, config.average_decay
    return TrainedState(parameters, optimizer, compressor, common, max_norm, drifts, decay)


def _check_start(target_batch_size: int, initial_peers: Sequence[str], config: TrainingConfig) -> None:
    """Raise ValueError if a run can be neither founded nor joined with these arguments."""
    if target_batch_size <= 0:
        raise ValueError(f"target_batch_size is {target_batch_size}: expected at least 1")
    if isinstance(initial_peers, str):
        raise ValueError("initial_peers is a text: expected a list of multiaddrs")
    if config.client_mode and not initial_peers:
        raise ValueError("client_mode needs initial_peers: a run is founded by a peer that others can call")
