"""Remote blocks as a module that can be sliced, called on hidden states, and differentiated."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from swarm_client.adapters.prompts import Prompts
from swarm_client.adapters.snapshots import ActiveAdapter, AdapterSnapshot
from swarm_client.core import background
from swarm_client.model.hollow_blocks import INSTEAD, HollowBlocks, Inside
from swarm_client.model.left_out import require_padding_mask
from swarm_client.model.model_pass import DeepStack, ModelPass, needs_grad, starts_of
from swarm_client.passes.passes import backward, forward
from swarm_client.sessions.opening import SessionOptions
from swarm_client.sessions.session import RemoteSession, check_length
from swarm_client.swarm.swarm import Swarm
from swarm_protocol.errors import RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter
from swarm_protocol.wire.block_input import BlockInput


class RemoteSpan:
    """A span of a model's blocks, on whichever servers they are.

    ``span(hidden)`` runs the blocks. ``span[a:b]`` is a part of the span, counted from the model's first block.
    """

    def __init__(
        self, swarm: Swarm, span: Span, max_positions: int | None, added: Callable[[], ActiveAdapter] = ActiveAdapter
    ) -> None:
        """Set up a span. ``added`` is a function that returns what the client adds to the model's blocks at present."""
        self.swarm = swarm
        self.span = span
        self.max_positions = max_positions
        self._added = added

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, blocks: slice) -> RemoteSpan:
        """Return a part such as ``model.blocks[6:10]``. Raise ValueError if it is outside this span."""
        if not isinstance(blocks, slice) or blocks.step not in (None, 1):
            raise ValueError(f"remote blocks are taken by a slice such as blocks[6:10], not {blocks!r}")
        start = self.span.start if blocks.start is None else blocks.start
        end = self.span.end if blocks.stop is None else blocks.stop
        span = Span(start, end)
        if not self.span.covers(span):
            raise ValueError(f"blocks {span} are outside {self.span}")
        return RemoteSpan(self.swarm, span, self.max_positions, self._added)

    @property
    def added(self) -> ActiveAdapter:
        """Return what the client adds to these blocks at present."""
        return self._added().over(self.span)

    def __call__(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        *,
        snapshot: AdapterSnapshot | None = None,
        packed: bool = True,
        joined: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states after the last block, [batch, tokens, hidden_size], computed without a cache.

        Gradients flow to ``hidden``, and to the adapter and prompts that the client adds to these blocks.

        Args:
            hidden: [batch, tokens, hidden_size], the input of the first block of the span.
            attention_mask: [batch, tokens], 0 for padding; None without padding.
            position_ids: [batch or 1, tokens], or [batch or 1, tokens, axes]; None for 0, 1, 2, …
            snapshot: what is added to the blocks; by default what the client adds at present.
            packed: without a mask, a position that does not follow the previous one begins another sequence in the
                same row. That sequence does not see earlier ones, as in stock models without a cache.
            joined: uint8 [batch, tokens], which positions attend to later ones, as those of a picture do in some
                models; see ``BlockInput``. None if none do.

        Raises:
            NoRoute, PeerError, RequestRejected: see ``swarm_protocol.errors``.
        """
        require_padding_mask(attention_mask)
        if not hidden.numel():
            raise RequestRejected(f"hidden states of shape {list(hidden.shape)} are empty: expected some positions")
        check_length(hidden.shape[1], self.max_positions)
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        added = self.added
        tensors = added.adapter.tensors
        snapshot, need_grad = snapshot or added.snapshot(), needs_grad(hidden, *tensors)
        is_packed = packed and attention_mask is None and joined is None
        inputs = BlockInput(hidden, attention_mask, position_ids, is_packed, joined=joined)
        return _RemoteForward.apply(hidden, inputs, self, added.drops, snapshot, need_grad, *tensors)

    def open_session(self, reserve_tokens: int = 0, **options: Any) -> RemoteSession:
        """Return a session over these blocks. The arguments are those of ``SessionOptions``.

        Raises ValueError if a value is wrong.
        """
        session_options = SessionOptions(reserve_tokens, **options)
        return RemoteSession(self.swarm, self.span, self.max_positions, session_options, lambda: self.added.snapshot())

    def __repr__(self) -> str:
        return f"RemoteSpan(blocks {self.span} of {self.swarm.model})"


class _RemoteForward(torch.autograd.Function):
    """The autograd function of frozen remote blocks. Its backward sends inputs again to servers that did not keep them.

    The tensors of an adapter are inputs too, so that autograd receives their gradients.
    """

    @staticmethod
    def forward(
        ctx, hidden, inputs: BlockInput, blocks: RemoteSpan, drops: bool, adapter: AdapterSnapshot, need_grad, *tensors
    ):
        seed = int(torch.randint(1, 2**63 - 1, ())) if drops else 0  # by torch's seed, as local dropout; 0: none
        span, first_grad = blocks.span, None
        if need_grad:
            first_grad = span.start if ctx.needs_input_grad[0] else adapter.begins(span)
        pieces, ways = background.run(forward(blocks.swarm, span, inputs, adapter, seed, first_grad))
        ctx.kept = blocks, adapter, ways, [(tensor.device, tensor.dtype) for tensor in tensors]
        return torch.cat(pieces).to(hidden.device)

    @staticmethod
    def backward(ctx, grad):
        need_input, (blocks, adapter, ways, likes) = ctx.needs_input_grad[0], ctx.kept
        pieces, of_adapter = background.run(backward(blocks.swarm, blocks.span, ways, grad, adapter, need_input))
        input_grad = torch.cat(pieces).to(grad.device) if need_input else None
        # ``forward`` has five arguments between ``hidden`` and the tensors.
        return input_grad, *(None,) * 5, *(sum_.to(*like) for sum_, like in zip(of_adapter, likes, strict=True))


class BlockModule(Inside):
    """A module in the place of a stock model's block. Hooks on it see and change the same states as on the block.

    The model's code calls the module with keyword arguments that differ between families. ``RemoteBlocks`` already has
    those that matter (mask, positions, cache). The block's own modules are inside, without weights.
    """

    # Servers decide what they keep for the backward pass.
    gradient_checkpointing = property(lambda _self: False, lambda _self, _value: None)

    def __init__(self, blocks: RemoteBlocks, index: int) -> None:
        nn.Module.__init__(self)  # not super(), because a family's block class may come next in the MRO
        self._blocks, self.index = [blocks], index  # in a list, so that it is not a submodule

    def forward(self, hidden: torch.Tensor, *_args, **_kwargs):
        return self._blocks[0].through(self.index, hidden)

    @property
    def remote(self) -> RemoteSpan:
        """Return all blocks of the model."""
        return self._blocks[0]._remote[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            index = self.__dict__.get("index")
            raise AttributeError(f"block {index} is computed on servers and has no {name!r} here: {INSTEAD}") from None


class BlockList(nn.ModuleList):
    """The list of the modules that stand for blocks, in the place of the stock model's list. Its slices can be called.

    ``model.model.layers[6:10](hidden)`` is ``model.blocks[6:10](hidden)``. A slice of a slice counts from the first
    block of the outer slice, as in a Python list.
    """

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states after the last block of the list; see ``RemoteSpan`` for arguments and shapes.

        Raises:
            RequestRejected: the blocks are not consecutive, or there are none.
        """
        modules: list[Any] = list(self)
        indices = [module.index for module in modules]
        if not indices or indices != list(range(indices[0], indices[0] + len(indices))):
            raise RequestRejected(f"blocks {indices} cannot be called: expected consecutive blocks")
        blocks = modules[0].remote[indices[0] : indices[-1] + 1]
        return blocks(hidden, attention_mask, position_ids)


class RemoteBlocks(BlockModule):
    """The module of the first block, which also holds what all blocks share.

    Attributes:
        prompts: the prompts that the client adds to the blocks; None if there are none.
        hollow: the modules inside the blocks, where PEFT puts its layers; None until the model is loaded.
        adapter_name: the name of the adapter that servers add themselves; empty if there is none.
    """

    def __init__(self, returns_tuple: bool, block_class: type[BlockModule], num_others: int) -> None:
        """Create the modules of all blocks: this one, and ``num_others`` of ``block_class``."""
        BlockModule.__init__(self, self, 0)
        self.modules_in_place: list[BlockModule] = [self]
        self.modules_in_place += [block_class(self, index) for index in range(1, num_others + 1)]
        self._returns_tuple = returns_tuple
        self._remote: list[RemoteSpan] = []  # in a list, so that it is not part of the module
        self._context = _ForwardContext()
        self._salt = secrets.token_bytes(32)  # without it, others could guess the key of an adapter that servers hold
        self.prompts: Prompts | None = None
        self.hollow: HollowBlocks | None = None
        self.adapter_name = ""

    def added(self) -> ActiveAdapter:
        """Return what is added to the blocks at present."""
        low_rank = () if self.hollow is None else tuple(self.hollow.low_rank())
        prompts = () if self.prompts is None else tuple(self.prompts.of_blocks())
        return ActiveAdapter(Adapter(self._salt, low_rank, prompts), self.adapter_name, self.training)

    @property
    def num_virtual(self) -> int:
        """Return the number of virtual positions before the first position that users see, per row."""
        return 0 if self.prompts is None else self.prompts.num_tokens

    def connect(self, remote: RemoteSpan, adapter_name: str = "") -> None:
        self._remote[:], self.adapter_name = [remote], adapter_name

    def fill(self, hollow: HollowBlocks) -> None:
        """Put modules without weights inside the blocks."""
        self.hollow = hollow

    def add_prompts(self, prompts: Prompts) -> None:
        """Add these prompts to the blocks."""
        self.prompts = prompts

    def begin(
        self,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        session: RemoteSession | None,
        *,
        later: bool = False,
        packed: bool = False,
        every_block: bool = False,
        deep_stack: DeepStack | None = None,
        joined: torch.Tensor | None = None,
    ) -> None:
        """Prepare this thread for a forward of the model, which begins now.

        Args:
            later: whether servers open the session only at its next step, if a next step follows.
            every_block: whether the hidden states after every block are read.
        """
        modules = self.modules_in_place
        starts = starts_of(modules, every_block)
        num_wanted = self._context.num_wanted if len(starts) == 1 else None  # between blocks, all positions are read
        starts = [block for block in starts if block < len(modules)]  # the end of the last block starts nothing
        model_pass = ModelPass(
            self.remote,
            attention_mask,
            position_ids,
            session,
            later,
            packed,
            starts,
            num_wanted,
            deep_stack,
            joined,
        )
        self._context.begin(model_pass, self.prompts is not None and (session is None or not session.length))

    def end(self, output: Any) -> Any:
        """End the forward, and return its output without virtual tokens. ``output`` is None if the forward failed."""
        ended = self._context.end()
        if output is None:
            return None
        if ended is not None:
            ended.finish()
        return self.prompts.without(output) if self.prompts is not None and self._context.has_virtual else output

    @torch.compiler.disable  # the compiler cannot look into coroutines
    def through(self, block: int, hidden: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Return the output of this block's module for ``hidden``, [batch, new, hidden_size]; some return a tuple."""
        model_pass = self._context.model_pass
        if model_pass is None:
            raise RequestRejected(
                f"block {block} is computed on servers: call model.blocks[{block}:{block + 1}](hidden), not the module "
                "that stands for it in the model"
            )
        output = model_pass.through(block, hidden)
        return (output, None) if self._returns_tuple else output

    def only_last(self, num_wanted: int | None) -> AbstractContextManager[None]:
        """Make sessions in this thread return only the last ``num_wanted`` positions, after zeros; None: all."""
        return self._context.only_last(num_wanted)


class _ForwardContext(threading.local):
    """The forward that a thread runs at present.

    Attributes:
        model_pass: its pass through the blocks; None between two forwards.
        has_virtual: whether its output begins with virtual tokens.
        num_wanted: how many of the last positions it needs; None: all.
    """

    def __init__(self) -> None:
        self.model_pass: ModelPass | None = None
        self.has_virtual = False
        self.num_wanted: int | None = None

    def begin(self, model_pass: ModelPass, has_virtual: bool) -> None:
        self.model_pass, self.has_virtual = model_pass, has_virtual

    def end(self) -> ModelPass | None:
        """Return the pass that ends, and drop it, because otherwise the thread would keep a session."""
        ended, self.model_pass = self.model_pass, None
        return ended

    @contextmanager
    def only_last(self, num_wanted: int | None) -> Iterator[None]:
        self.num_wanted = num_wanted
        try:
            yield
        finally:
            self.num_wanted = None
