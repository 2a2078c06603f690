"""One stage of a model, which computes micro-batches forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from swarm_models.checkpoints.family import max_positions
from swarm_protocol.errors import RequestRejected
from swarm_training.stages.compress.layers import BoundaryCompression
from swarm_training.stages.engine.boundaries import down_of, up_of
from swarm_training.stages.engine.kept import GraphMemoryMeter, KeptPass, KeptPasses
from swarm_training.stages.engine.settings import StageOptions
from swarm_training.stages.engine.skeleton import Layout, base_of, keeps_fp32

IGNORED = -100  # a label that counts for nothing, as in transformers


@dataclass(frozen=True)
class StageOutput:
    """The output of a stage: hidden states for the next stage, or the loss of the last stage."""

    hidden: Tensor | None = None  # [batch, positions, width], in the stage's precision
    loss_sum: Tensor | None = None  # [], float64: cross entropy summed over the predicted tokens
    num_tokens: int | None = None  # the number of predicted tokens


@dataclass(frozen=True)
class StageGradients:
    """The gradients of a micro-batch at a stage."""

    inputs: Tensor | None  # [batch, positions, width], for the stage before; None from the first
    parameters: list[Tensor]  # one for each of ``Stage.parameters``, in its shape, in the stage's precision
    # ``loss_sum``, ``num_tokens``: as in ``StageOutput``, from the last stage.
    loss_sum: float | None = None
    num_tokens: int | None = None


class Stage:
    """A stage of a model, made by ``build_stage``. Only one thread at a time may use it.

    It computes without dropout, so that a micro-batch has the same gradients at every peer. Routers' auxiliary losses
    (``output_router_logits``) are left out: they would need what the routers of all stages return.

    Attributes:
        index: the number of the stage among ``num_stages``; ``span`` has its blocks.
        width: the numbers of a token that travel between stages: the hidden size, or less with layers in between.
        parameters: the trained parameters, in fp32, in the order of the stock model. Code that changes them in place
            (optimizers, ``TrainedState``) changes what the stage computes from then on.
        shared: the names of parameters that another stage has too: the first and the last one if embeddings are tied.
            Both stages must step with the sum of both stages' gradients, so that they stay equal.
    """

    def __init__(
        self, model: PreTrainedModel, layout: Layout, index: int, num_stages: int, options: StageOptions
    ) -> None:
        self.index, self.num_stages, self.span = index, num_stages, layout.span
        self.is_first, self.is_last = layout.is_first, layout.is_last
        self.width = BoundaryCompression.parse(options.boundaries.layers).width(layout.family.hidden_size)
        self.options = options
        self._model, self._base = model, base_of(model, layout.family)
        self._up, self._down = up_of(model, self.span.start), down_of(model, self.span.end)
        self._family = layout.family
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.names = list(trained)
        self._working = list(trained.values())  # the modules compute with these
        embedding = getattr(layout.family.owner_of(self._base), layout.family.embedding)
        tied = layout.tied and self.is_first != self.is_last  # one stage that is both has the parameter once
        self.shared = tuple(name for name, each in trained.items() if tied and each is embedding.weight)
        # In bf16, the optimizer steps with fp32 parameters, since many steps are smaller than bf16 can show.
        self.parameters, self.dtype = self._working, torch.float32
        if options.precision == "bf16":
            self.parameters, self.dtype = (
                [nn.Parameter(each.detach().clone()) for each in self._working],
                torch.bfloat16,
            )
            _narrow(model)
        self._versions = [each._version for each in self.parameters]
        self.num_trained = sum(each.numel() for each in self.parameters)
        self._recompute = False  # whether blocks are checkpointed: in backward passes alone, if the options say so
        self._kept = KeptPasses(0 if options.checkpoint_activations else options.kept_bytes)
        if options.checkpoint_activations:
            blocks = getattr(layout.family.owner_of(self._base), layout.family.blocks)
            for block in self.span:  # a module around a block would change the names of its parameters
                blocks[block].forward = functools.partial(self._run_block, blocks[block].forward)

    def keep_at_most(self, size_bytes: int) -> None:
        """Set the most bytes of activations that wait for their backward, instead of what the options say."""
        self._kept.limit(0 if self.options.checkpoint_activations else size_bytes)

    @property
    def untrained_bytes(self) -> int:
        """Return the bytes of weights that are not trained, and of the copies that a stage in bf16 computes with."""
        trained = {id(each) for each in self.parameters}
        return sum(each.nbytes for each in self._model.parameters() if id(each) not in trained)

    # ---------------------------------------------------------------- compute

    def forward(self, inputs: Tensor, labels: Tensor | None = None, keeps: bool = True) -> StageOutput:
        """Compute a micro-batch; keep the graph of the output for ``backward`` if there is room.

        Args:
            inputs: token ids [batch, positions] int64 at the first stage, else hidden states [batch, positions, width]
                of any floating dtype.
            labels: [batch, positions] int64, for the last stage, usually the token ids. The token at position i + 1 is
                predicted at i, and −100 counts for nothing.
            keeps: False if no ``backward`` follows, so that no graph is kept.

        Raises:
            RequestRejected: a tensor is missing, or of a wrong shape, dtype or range.
        """
        self._check(inputs, labels)
        self._refresh()
        given = self._prepared(inputs)
        if keeps and self._kept.has_room and not self.is_last:  # the last stage gets backward passes alone
            return StageOutput(hidden=self._run_and_keep(given))
        with torch.no_grad():  # not inference mode: autograd could never use the tensors that a model keeps
            output = self._run(given)
            if not self.is_last:
                return StageOutput(hidden=output)
            loss_sum, num_tokens = self._loss(output, labels)
            return StageOutput(loss_sum=loss_sum.double(), num_tokens=num_tokens)

    def backward(
        self, inputs: Tensor, labels: Tensor | None = None, grad: Tensor | None = None, loss_scale: float = 1.0
    ) -> StageGradients:
        """Compute the gradients of a micro-batch; run its forward pass again if ``forward`` has not kept the graph.

        Args:
            inputs, labels: as for ``forward``.
            grad: [batch, positions, width], the output's gradient from the next stage; not for the last stage.
            loss_scale: the divisor of the loss *sum* that the last stage differentiates. It must be equal for all M
                micro-batches of a batch, so that their gradients add up. The batch's number of tokens makes their sum
                the gradient of the mean over all tokens. The same number divided by M makes their mean this gradient.

        Raises:
            RequestRejected: as ``forward``; or ``grad`` is missing or of a wrong shape.
        """
        self._check(inputs, labels)
        self._check_grad(inputs, grad, loss_scale)
        self._refresh()
        given = self._prepared(inputs)
        kept = self._kept.take(given)
        if kept is not None:
            given = kept.given
        wanted: list[Tensor] = list(self._working)
        if not self.is_first:
            given.requires_grad_(True)
            wanted.append(given)
        loss_sum, num_tokens = None, None
        self._recompute = self.options.checkpoint_activations
        try:
            with torch.enable_grad():
                output = self._run(given) if kept is None else kept.output
                if self.is_last:
                    loss, num_tokens = self._loss(output, labels)
                    loss_sum, output, grad = float(loss.detach()), loss / loss_scale, None
                else:
                    assert grad is not None  # as checked
                    grad = grad.to(output.device, output.dtype)
                found = torch.autograd.grad(output, wanted, grad, allow_unused=True)
        finally:
            self._recompute = False
        gradients = [  # None for a parameter that the pass has not used, such as those of an expert without tokens
            torch.zeros_like(each) if gradient is None else gradient
            for each, gradient in zip(wanted, found, strict=True)
        ]
        return StageGradients(
            None if self.is_first else gradients.pop(),
            gradients,
            loss_sum,
            num_tokens,
        )

    def _run_and_keep(self, given: Tensor) -> Tensor:
        given.requires_grad_(not self.is_first)
        with torch.enable_grad(), GraphMemoryMeter(self._working) as measured:
            output = self._run(given)
        self._kept.keep(KeptPass(given, output, measured.size_bytes + given.nbytes + output.nbytes))
        return output.detach()

    def _prepared(self, inputs: Tensor) -> Tensor:
        inputs = inputs.detach().to(self.options.device)
        return inputs if self.is_first else inputs.to(self.dtype)

    def _run(self, inputs: Tensor) -> Tensor:
        """Return hidden states as they travel, or the last stage's logits [batch, positions, vocabulary]."""
        given = {"input_ids": inputs} if self.is_first else {"inputs_embeds": self._up(inputs)}
        output: Any = (self._model if self.is_last else self._base)(**given, use_cache=False, return_dict=True)
        result: Tensor = output.logits if self.is_last else self._down(output.last_hidden_state)
        return result

    def _loss(self, logits: Tensor, labels: Tensor | None) -> tuple[Tensor, int]:
        assert labels is not None  # as checked
        targets = labels[:, 1:].to(logits.device)
        rows = logits[:, :-1].float().flatten(0, 1)
        loss_sum = functional.cross_entropy(rows, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss_sum, int((targets != IGNORED).sum())

    def _run_block(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._recompute:
            return block(*args, **kwargs)
        return checkpoint(block, *args, use_reentrant=False, **kwargs)

    def _refresh(self) -> None:
        """Update the copies of parameters that have changed, and drop passes that were computed with other weights."""
        if self.parameters is not self._working:
            self._refresh_copies()
        self._kept.of_weights(self._working)

    def _refresh_copies(self) -> None:
        with torch.no_grad():
            for number, (parameter, copy) in enumerate(zip(self.parameters, self._working, strict=True)):
                if parameter._version != self._versions[number]:
                    copy.copy_(parameter)
                    self._versions[number] = parameter._version

    # ---------------------------------------------------------------- checks

    def _check(self, inputs: Tensor, labels: Tensor | None) -> None:
        if self.is_first:
            self._check_tokens("inputs", inputs, None)
        elif inputs.dim() != 3 or inputs.shape[2] != self.width or not inputs.is_floating_point():
            raise RequestRejected(
                f"inputs are {_described(inputs)}: stage {self.index} expects hidden states of shape "
                f"[batch, positions, {self.width}]"
            )
        elif not inputs.numel():
            raise RequestRejected("inputs have no positions: expected at least one")
        limit = max_positions(self._model.config)
        if limit is not None and inputs.shape[1] > limit:
            raise RequestRejected(f"inputs have {inputs.shape[1]} positions: the model has {limit}")
        if self.is_last:
            if labels is None:
                raise RequestRejected(f"labels are missing: stage {self.index} is the last one and has the loss")
            self._check_tokens("labels", labels, inputs.shape[:2])

    def _check_tokens(self, what: str, ids: Tensor, shape: torch.Size | None) -> None:
        vocabulary = int(self._model.config.vocab_size)
        if ids.dim() != 2 or ids.dtype != torch.int64 or not ids.numel() or (shape is not None and ids.shape != shape):
            expected = "[batch, positions]" if shape is None else str(list(shape))
            raise RequestRejected(f"{what} are {_described(ids)}: expected token ids of shape {expected} in int64")
        wrong = (ids < 0) | (ids >= vocabulary)
        if what == "labels":
            wrong &= ids != IGNORED
        if bool(wrong.any()):
            raise RequestRejected(f"{what} have the token {int(ids[wrong][0])}: expected 0 to {vocabulary - 1}")

    def _check_grad(self, inputs: Tensor, grad: Tensor | None, loss_scale: float) -> None:
        if self.is_last:
            if grad is not None:
                raise RequestRejected("grad is given: the last stage has the loss, and expects labels alone")
            if not 0 < loss_scale < float("inf"):
                raise RequestRejected(f"loss_scale is {loss_scale}: expected a number above 0")
            return
        expected = [*inputs.shape[:2], self.width]
        if grad is None or list(grad.shape) != expected or not grad.is_floating_point():
            found = "missing" if grad is None else _described(grad)
            raise RequestRejected(f"grad is {found}: stage {self.index} expects the gradient of its output, {expected}")

    # ---------------------------------------------------------------- state

    def state(self) -> dict[str, Tensor]:
        """Return the stage's part of the stock model's ``state_dict`` and its boundary layers; with LoRA, the adapters'
        matrices alone.

        Tensors are the stage's own, parameters in fp32.
        """
        trained = dict(zip(self.names, (each.detach() for each in self.parameters), strict=True))
        if self.options.lora is not None:
            return trained
        stored = set(self._model.state_dict())  # buffers that are not persistent are left out
        rest = {name: each for name, each in _tensors(self._model) if name in stored and name not in trained}
        return trained | rest


def _tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yield each tensor once, under its first name."""
    yield from ((name, each.detach()) for name, each in model.named_parameters())
    yield from model.named_buffers()


def _narrow(model: PreTrainedModel) -> None:
    """Convert parameters to bf16, except those that the family keeps in fp32. Buffers stay as they are."""
    for name, parameter in model.named_parameters():
        if not keeps_fp32(model, name):
            parameter.data = parameter.data.to(torch.bfloat16)


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
