"""One forward of a stock model through its remote blocks; a module in the model stands for each block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swarm_protocol.errors import RequestRejected
from swarm_protocol.wire.block_input import BlockInput

if TYPE_CHECKING:
    from swarm_client.adapters.snapshots import AdapterSnapshot
    from swarm_client.model.remote_blocks import RemoteSpan
    from swarm_client.sessions.session import RemoteSession


@dataclass
class DeepStack:
    """The features of pictures that the stock code adds to the outputs of the first blocks.

    Attributes:
        features: for each of these blocks, [picture tokens, hidden_size]. The stock code reads the list after a block.
        where: [batch, tokens], True at the picture tokens.
    """

    features: list[torch.Tensor]
    where: torch.Tensor

    @classmethod
    def taken_from(cls, given: dict[str, Any]) -> DeepStack | None:
        """Return the features in the arguments of a forward, in a list that ``given`` shares; None without features.

        Raises:
            RequestRejected: the model adds features in another way.
        """
        if given.get("deepstack_features"):  # of Granite 4 Vision, for blocks far apart
            raise RequestRejected(
                "this model adds parts of a picture before its blocks, which are on servers: give it text alone"
            )
        if not given.get("deepstack_visual_embeds"):
            return None
        # The pass empties this list if servers add the features, and then the stock code has nothing to add.
        given["deepstack_visual_embeds"] = features = list(given["deepstack_visual_embeds"])
        return cls(features, given["visual_pos_masks"])

    def additions(self, num_blocks: int) -> torch.Tensor:
        """Return the additions to the outputs of a model's blocks; see ``BlockInput``."""
        features = torch.stack(self.features[:num_blocks], 1).detach()
        additions = features.new_zeros(*self.where.shape, *features.shape[1:])
        additions[self.where.to(features.device)] = features
        return additions


@dataclass
class ModelPass:
    """One forward pass. The blocks from one start to the next are computed when the module of that start is called.

    Attributes:
        later: whether servers open the session only at its next step, if a next step follows.
        packed: see ``RemoteSpan``; only used without a session.
        starts: the blocks whose input is read or changed here; the first block is always among them.
        num_wanted: how many of the last outputs are used, if a session computes them; None means all.
        deep_stack: what the stock code adds between blocks, unless servers do; None if it adds nothing.
        joined: see ``BlockInput``.
    """

    remote: RemoteSpan
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    session: RemoteSession | None
    later: bool
    packed: bool
    starts: Sequence[int]
    num_wanted: int | None
    deep_stack: DeepStack | None = None
    joined: torch.Tensor | None = None

    _snapshot: AdapterSnapshot | None = None  # of the adapter and prompts, in a pass without a session
    _first: torch.Tensor | None = None  # input of the first block
    _additions: torch.Tensor | None = None  # of the deep stack
    _outputs: dict[int, torch.Tensor] | None = None  # a session's outputs, by the start that they enter next

    def through(self, block: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of this block's module, [batch, new, hidden_size]."""
        if block not in self.starts:
            return hidden
        if self._snapshot is None and self._outputs is None:
            self._begin(hidden)
        if self._outputs is not None:
            return self._computed(block, hidden)
        blocks = self.remote[block : self._end(block)]
        return blocks(
            hidden,
            self.attention_mask,
            self.position_ids,
            snapshot=self._snapshot,
            packed=self.packed,
            joined=self.joined,
        )

    def finish(self) -> None:
        """Give the first positions to a session that this pass has not used. Call this after the model's forward."""
        if self.session is not None and self._snapshot is not None:
            assert self._first is not None
            inputs = self._inputs(self._first)
            self.session.begin_with(inputs, self._snapshot)

    def _end(self, block: int) -> int:
        return min([self.remote.span.end, *(start for start in self.starts if start > block)])

    def _begin(self, hidden: torch.Tensor) -> None:
        session, tensors = self.session, self.remote.added.adapter.tensors
        if self.position_ids is None:
            past, new = 0 if session is None else session.length, hidden.shape[1]
            self.position_ids = torch.arange(past, past + new, device=hidden.device)[None]
        features: list[torch.Tensor] = []
        if self.deep_stack is not None:
            features, self._additions = self.deep_stack.features, self.deep_stack.additions(self.remote.span.end)
        need_grad, are_read = needs_grad(hidden, *tensors, *features), bool(features) and len(self.starts) > 1
        if session is None or (not session.length and (self.later or need_grad or are_read)):
            # The stock code adds features after each of the first blocks here, so that the next block is a start.
            self._snapshot, self._first = self.remote.added.snapshot(), hidden.detach()
            self.starts = sorted({*self.starts, *range(1, min(len(features) + 1, self.remote.span.end))})
            return
        if are_read:
            raise RequestRejected(
                "pictures of this model are added between its first blocks, of which hidden states are read here: pass "
                "use_cache=False, or an empty cache"
            )
        features.clear()  # servers add them, and the stock code finds nothing to add
        compute = partial(self._step, session, hidden.detach())
        outputs = _FromCache.apply(compute, hidden, *tensors) if need_grad else compute()
        ends = map(self._end, self.starts)
        self._outputs = dict(zip(ends, outputs, strict=True))

    def _inputs(self, hidden: torch.Tensor) -> BlockInput:
        """Return the input of the first block, with these hidden states."""
        return BlockInput(hidden, self.attention_mask, self.position_ids, additions=self._additions, joined=self.joined)

    def _step(self, session: RemoteSession, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run one step of the session; return the outputs of the blocks before each start, and of the last block."""
        inputs = self._inputs(hidden)
        if len(self.starts) > 1:
            outputs = session.step_through(inputs)
            return tuple(outputs[self._end(start) - 1].to(hidden.device) for start in self.starts)
        wanted = session.step(inputs, self.num_wanted).to(hidden.device)
        missing = hidden.shape[1] - wanted.shape[1]  # nobody reads these positions
        return (nn.functional.pad(wanted, (0, 0, missing, 0)) if missing else wanted,)

    def _computed(self, block: int, hidden: torch.Tensor) -> torch.Tensor:
        assert self._outputs is not None
        # No block of this pass has computed the input of the first start.
        if block != self.starts[0] and not torch.equal(hidden, self._outputs[block]):
            raise RequestRejected(
                f"the hidden states that enter block {block} were changed here, but servers go on with theirs where "
                "they keep a cache: leave them as they are, or pass use_cache=False"
            )
        output = self._outputs[self._end(block)]
        return output.clone() if len(self.starts) > 1 else output  # so that an in-place change is noticed


def starts_of(modules: Sequence[nn.Module], every_block: bool) -> list[int]:
    """Return the blocks at which a pass must stop, because of ``every_block`` or a foreign hook.

    The list includes the number of blocks if something reads the output of the last block.
    """
    starts = {0}
    for block, module in enumerate(modules):
        both = every_block or are_foreign(module._backward_hooks, module._backward_pre_hooks)
        if both or are_foreign(module._forward_pre_hooks):
            starts.add(block)
        if both or are_foreign(module._forward_hooks):
            starts.add(block + 1)
    return sorted(starts)


def are_foreign(*hooks: dict[int, Callable]) -> bool:
    """Return whether some hooks are neither ours nor those with which transformers collects hidden states."""
    ours = ("swarm_client.", "transformers.utils.output_capturing")
    return any(not getattr(hook, "__module__", "").startswith(ours) for some in hooks for hook in some.values())


def needs_grad(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _FromCache(torch.autograd.Function):
    """The autograd function for outputs of a filled cache. It has no gradient, because the cache keeps no graph."""

    @staticmethod
    def forward(_ctx, compute: Callable[[], tuple[torch.Tensor, ...]], *_inputs: torch.Tensor):
        return compute()

    @staticmethod
    def backward(_ctx, *_grads):
        raise RequestRejected(
            "gradients do not flow through a cache of remote blocks that was filled before: compute what is to be "
            "trained in one pass, without past_key_values or with use_cache=False, and decode under torch.no_grad()"
        )
