"""Stock model classes with remote blocks in the place of their own blocks."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import AsyncIterable, Iterable
from os import PathLike
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from swarm_client.adapters.lora import LoraMixin
from swarm_client.adapters.prompts import PromptsMixin
from swarm_client.adapters.trained import save_for_trainer
from swarm_client.batching.joining import SharedLoop
from swarm_client.core import background
from swarm_client.model.cache import RemoteCache, leaving_rows, session_of
from swarm_client.model.head import final_norm, float_head
from swarm_client.model.hollow_blocks import HollowBlocks
from swarm_client.model.left_out import (
    NoDropout,
    refuse_inner_outputs,
    require_no_shift,
    require_padding_mask,
    wants,
    without_router_logits,
)
from swarm_client.model.masks import read_masks, require_alone
from swarm_client.model.model_pass import DeepStack, are_foreign, starts_of
from swarm_client.model.remote_blocks import BlockList, BlockModule, RemoteBlocks, RemoteSpan
from swarm_client.sessions.session import RemoteSession
from swarm_client.speculation.generating import speculative_sample
from swarm_client.speculation.speculation import Speculation
from swarm_client.swarm.swarm import Swarm
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.family import Family
from swarm_models.checkpoints.hollow_model import hf_loader, hosted_alone, named_like
from swarm_protocol.errors import RequestRejected
from swarm_protocol.failures import Closing, undone_on_error

B = TypeVar("B", bound=BlockModule)

_AXES = 3  # time, height and width; see ``Family.position_axes``


class RemoteModelMixin(PromptsMixin, LoraMixin, Closing):
    """The attributes and methods that a distributed model adds to the stock class.

    Attributes:
        speculation: the model's draft and its statistics; it may be replaced between generations.
    """

    speculation: Speculation
    no_dropout: NoDropout
    _family: Family
    _remote_blocks: list[RemoteBlocks]  # in a list, because the module is registered in the place of the blocks
    _owners: list[nn.Module]  # the module inside the model that holds the blocks; in a list for the same reason
    _shared_loop: SharedLoop

    def fill_blocks(self, config: PreTrainedConfig) -> None:
        """Put modules without weights into the remote blocks of a loaded model."""
        remote = self._remote_blocks[0]
        with hf_loader():
            remote.fill(HollowBlocks(self, self._family, config, remote.modules_in_place))

    def adopt(self, checkpoint: ModelCheckpoint) -> None:
        """Take over the checkpoint's generation config, and its location, by which a saved adapter names its model."""
        if checkpoint.generation_config is not None:
            self.generation_config = checkpoint.generation_config
        self.name_or_path = str(checkpoint.location)

    def connect(self, swarm: Swarm, max_positions: int | None, speculation: Speculation) -> None:
        """Connect the model's blocks to the swarm, and guess tokens by this speculation."""
        self.speculation = speculation
        remote = self._remote_blocks[0]
        # The errors of codecs are measured behind the final norm, in the state that the head gets.
        swarm.links.finish_with(final_norm(self._owners[0]))
        span = RemoteSpan(swarm, self._family.all_blocks, max_positions, remote.added)
        remote.connect(span, swarm.config.adapter)

    @property
    def blocks(self) -> RemoteSpan:
        """Return the remote blocks, for calls such as ``model.blocks[6:10](hidden)``."""
        return self._remote_blocks[0].remote

    @property
    def is_watched(self) -> bool:
        """Return whether foreign hooks are attached where hidden states pass, because these may read every state."""
        owner = self._owners[0]
        modules = self.base_model, owner, *owner.children()
        return any(are_foreign(module._forward_pre_hooks, module._forward_hooks) for module in modules)

    def outside_blocks(self) -> str | None:
        """Return a value of PEFT's ``exclude_modules`` that leaves out a vision tower; None if there is none."""
        owner = self._owners[0]
        if self.config.get_text_config(decoder=True) is self.config:
            return None
        path = next(name for name, module in self.named_modules() if module is owner)
        return rf"(?!{re.escape(path)}\.).*"

    def new_cache(self, reserve_tokens: int = 0, **options: Any) -> RemoteCache:
        """Return an empty cache to pass as ``past_key_values``; its ``session`` has ``stats`` and can be resumed.

        The arguments are those of ``RemoteSpan.open_session``, such as ``standby`` and ``on_event``.
        """
        num_virtual = self._remote_blocks[0].num_virtual
        return RemoteCache(self.blocks, reserve_tokens, num_virtual=num_virtual, **options)

    def close(self) -> None:
        """Leave the swarm. The model cannot compute afterwards."""
        self._shared_loop.close()
        background.run(self.blocks.swarm.close())

    def __reduce_ex__(self, _protocol: SupportsIndex) -> Any:  # ``copy`` and ``pickle`` both call this method
        raise TypeError(
            "a distributed model cannot be copied or pickled: from_pretrained connects another, and save_pretrained "
            "saves what was trained"
        )

    def generate(self, *args: Any, streamer: Any = None, **kwargs: Any) -> Any:
        """Run the stock ``generate``. Calls of several threads are computed together if each call has one row.

        If the call fails, an iterable streamer is ended, so that a thread that reads the streamer goes on.
        """
        if kwargs.get("cache_implementation") == "paged":
            self.generate_batch()

        def end_reading() -> None:
            if isinstance(streamer, Iterable | AsyncIterable):
                streamer.end()  # type: ignore[union-attr]

        with undone_on_error(end_reading), self._shared_loop.running() as are_others:
            if are_others and len(args) <= 1:  # the loop takes keywords, and ``inputs`` is the first argument
                arguments = {"inputs": args[0], **kwargs} if args else kwargs
                output = self._shared_loop.join(self, arguments, streamer)
                if output is not None:
                    return output
            return super().generate(*args, streamer=streamer, **kwargs)  # type: ignore[misc]  # of GenerationMixin

    def generate_batch(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise RequestRejected, because servers do the continuous batching, over the sessions of all clients."""
        raise RequestRejected(
            "generate_batch and cache_implementation='paged' keep keys and values on this machine, where there are no "
            "blocks: call generate with a batch, or from several threads, whose generations servers compute together"
        )

    # The next methods are stock methods that read or write the head's weight. An int8 head is a float head meanwhile.

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        with float_head(self):
            super().tie_weights(*args, **kwargs)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        with float_head(self):
            return super().resize_token_embeddings(*args, **kwargs)

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Save the trained part of the model: the adapter, or the prompts.

        Raises:
            RequestRejected: the model has neither. A checkpoint without blocks would load with random blocks.
        """
        self._require_something_to_save()
        with float_head(self):
            result = super().save_pretrained(save_directory, *args, **kwargs)
        save_for_trainer(self, save_directory)
        return result

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Upload what ``save_pretrained`` saves, and raise as it does."""
        self._require_something_to_save()
        return super().push_to_hub(*args, **kwargs)

    def _require_something_to_save(self) -> None:
        if self.prompts is None and not getattr(self, "_hf_peft_config_loaded", False):
            _refuse_to_save()

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        """Give ``generate``, which calls this method, a remote cache where it would make a local one.

        ``cache_implementation`` says where and in which shapes a local cache lies. It is ignored, because it does not
        change the tokens.
        """
        limit, num_virtual = self.blocks.max_positions, self._remote_blocks[0].num_virtual
        if limit is not None and max_cache_length + num_virtual > limit:
            raise RequestRejected(
                f"prompt and new tokens need {max_cache_length + num_virtual} positions, but the model has {limit}: "
                "shorten the prompt or ask for fewer new tokens"
            )
        argument = self._family.cache_argument
        own: RemoteCache | None = None
        if model_kwargs.get(argument) is None and generation_config.use_cache is not False:
            if generation_config.cache_implementation == "quantized":
                raise RequestRejected(
                    "cache_implementation='quantized' rounds keys and values on this machine, but servers hold them, "
                    "as they are: leave it out"
                )
            # The stock method refuses this beside a cache. The config is this call's own copy.
            generation_config.cache_implementation = None
            # A single session is faster without bundling: by 6 % of a token's time on one machine.
            is_bundled = batch_size == 1 and self._shared_loop.expects_others()
            options = {"is_bundled": is_bundled, "row_unit": generation_config.num_beams or 1}
            model_kwargs[argument] = own = self.new_cache(max_cache_length + num_virtual, **options)
        super()._prepare_cache_for_generation(  # type: ignore[misc]  # of GenerationMixin
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if own is not None:  # the stock method has marked the cache as the user's, because it was there before
            own.end_with_call()

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Choose the tokens for ``generate``; one pass through the servers gives several where guesses are right.

        Servers do not continue the rows of a batch whose text has ended, unless something here reads hidden states.
        """
        cache = model_kwargs.get(self._family.cache_argument)
        if not self.is_watched and not self._reads_blocks(generation_config):
            stopping_criteria = leaving_rows(stopping_criteria, cache, generation_config, len(input_ids))
        arguments = input_ids, logits_processor, stopping_criteria, generation_config
        if self.prompts is None and not self.is_watched:
            output = speculative_sample(self, *arguments, synced_gpus, streamer, model_kwargs)
            if output is not None:
                return output
        return super()._sample(*arguments, synced_gpus, streamer, **model_kwargs)  # type: ignore[misc]  # of GenerationMixin

    def _session_in(self, cache: Cache) -> RemoteSession:
        return session_of(cache, self.blocks)

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Return the candidate generator for an ``assistant_model``.

        If no threshold was set, the assistant guesses even where it is unsure, because one more pass through servers
        costs more than wrong guesses.
        """
        generator = super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]  # of GenerationMixin
        assistant = getattr(generator, "assistant_model", None)
        if assistant is not None and assistant.generation_config.assistant_confidence_threshold is None:
            for config in (generator.generation_config, generator.assistant_generation_config):
                config.assistant_confidence_threshold = 0.0
        return generator

    def _reads_blocks(self, generation_config: Any) -> bool:
        """Return whether something reads hidden states between the blocks, or after the last one, in a generation."""
        given = {"output_hidden_states": generation_config.output_hidden_states or None}
        return starts_of(self._remote_blocks[0].modules_in_place, _needs_every_block(self._owners[0], given)) != [0]


def _refuse_to_save(*_args: Any, **_kwargs: Any) -> None:
    raise RequestRejected(
        "this model's blocks are on servers: saved without them, it would load with random ones. save_pretrained "
        "writes an adapter (model.add_adapter) or prompts (tuning_mode=...); what is here, such as a head that was "
        "trained, is in model.state_dict()"
    )


def client_class(hf_class: type[PreTrainedModel], family: Family) -> type[RemoteModelMixin]:
    """Return a subclass of the stock class with remote blocks in the place of its own blocks."""

    names = list(inspect.signature(hf_class.forward).parameters)[1:]

    class Client(RemoteModelMixin, hf_class):  # type: ignore[valid-type,misc]
        _family = family

        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            base: Any = next(module for module in self.modules() if isinstance(module, family.base_class))
            _leave_out_blocks(base, family)
            owner = family.owner_of(base)
            first = getattr(owner, family.blocks)[0]
            block_class = type(first)
            others = _as(block_class, BlockModule), family.num_blocks - 1
            blocks = _as(block_class, RemoteBlocks)(family.returns_tuple, *others)
            for module in blocks.modules_in_place:  # a family's own code may read a block's type
                vars(module).update({name: value for name, value in vars(first).items() if isinstance(value, str)})
            setattr(owner, family.blocks, BlockList(blocks.modules_in_place))
            self._remote_blocks, self._owners, self.no_dropout = [blocks], [owner], NoDropout(family)
            self._shared_loop, self.speculation = SharedLoop(), Speculation(None)
            owner.register_forward_pre_hook(_context_hook(owner, blocks, family, self.no_dropout), with_kwargs=True)
            owner.register_forward_hook(lambda _owner, _inputs, output: blocks.end(output), always_call=True)

        @torch.compiler.disable  # most of its time goes to the network
        @functools.wraps(hf_class.forward)  # transformers reads its signature at every token
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            kwargs |= without_router_logits(names, {**dict(zip(names, args, strict=False)), **kwargs}, self.config)
            num_wanted = None if self.is_watched else _num_wanted(self.config, kwargs)
            with self._remote_blocks[0].only_last(num_wanted):
                return super().forward(*args, **kwargs)

    Client.forward.__signature__ = inspect.signature(hf_class.forward)  # so that inspect finds it at once
    return named_like(hf_class, Client)


def _leave_out_blocks(base: Any, family: Family) -> None:
    """Make the base model refuse to be saved, and initialise its weights without its blocks."""
    base.save_pretrained = base.push_to_hub = _refuse_to_save
    init_weights = base._init_weights

    def without_blocks(module: nn.Module) -> None:
        if not isinstance(module, BlockModule):
            with hosted_alone(base, family, ()):  # some families' code looks into the blocks
                init_weights(module)

    base._init_weights = without_blocks


def _num_wanted(config: PreTrainedConfig, arguments: dict[str, Any]) -> int | None:
    """Return how many of the last hidden states a forward with these arguments uses; None means all."""
    num_kept = arguments.get("logits_to_keep")
    if wants("output_hidden_states", arguments, config):
        return None
    return num_kept if isinstance(num_kept, int) and num_kept > 0 else None


def _as(block_class: type[nn.Module], module_class: type[B]) -> type[B]:
    """Return a subclass that also is a ``block_class``: transformers records hidden states of modules by class."""
    return type(module_class.__name__, (module_class, block_class), {})


def _context_hook(owner: Any, blocks: RemoteBlocks, family: Family, no_dropout: NoDropout):
    """Return a hook that gives the blocks each forward's mask, positions and cache, and puts prompts before its input.

    The hook sits on the blocks' owner, because the arguments that an owner passes to a block differ between families.
    """
    names = list(inspect.signature(owner.forward).parameters)

    def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        refuse_inner_outputs(given, owner.config)
        # A model with pictures has made the masks already, as ``MaskFacts``.
        given["attention_mask"], joined = read_masks(given.get("attention_mask"))
        deep_stack = DeepStack.taken_from(given)
        require_padding_mask(given.get("attention_mask"))
        if blocks.training and torch.is_grad_enabled():
            no_dropout.warn(owner.config)
        cache = given.get(family.cache_argument)
        later = _opens_later(blocks, cache, given)  # before the next lines make a cache that nobody asked for
        use_cache = _uses_cache(owner, given)
        if cache is None and use_cache:
            cache = RemoteCache(blocks.remote, num_virtual=blocks.num_virtual)
        session = None if cache is None else session_of(cache, blocks.remote, blocks.num_virtual)
        past = 0 if session is None else session.length  # with virtual positions, which callers do not see
        positions_of_text, positions_of_blocks = _positions(given.get("position_ids"))
        # Without a mask, transformers applies this test to find out whether some row holds several sequences.
        packed = (
            cache is None
            and given.get("attention_mask") is None
            and positions_of_text is not None
            and find_packed_sequence_indices(positions_of_text) is not None
        )
        require_alone(joined, packed, blocks.prompts is not None)
        if blocks.prompts is not None:
            require_no_shift(packed, positions_of_blocks, deep_stack)
            # Some owners, such as BLOOM's, have no argument for positions.
            positions = {"position_ids": positions_of_blocks} if "position_ids" in names else {}
            given = blocks.prompts.before(given | positions, getattr(owner, family.embedding), past)
            positions_of_blocks = given.get("position_ids")
        blocks.begin(
            given.get("attention_mask"),
            positions_of_blocks,
            session,
            later=later,
            packed=packed,
            every_block=_needs_every_block(owner, given),
            deep_stack=deep_stack,
            joined=joined,
        )
        return (), {**given, **family.cache_arguments(cache, use_cache)}

    return hook


def _opens_later(blocks: RemoteBlocks, cache: Any, given: dict[str, Any]) -> bool:
    """Return whether a new cache takes no KV room on servers yet.

    That is so if nobody asked for a cache and the pass may be one of training. Such a cache is often never used.
    """
    asked = cache is not None or given.get("use_cache") is not None
    return not asked and (torch.is_grad_enabled() or blocks.remote.added.drops)


def _needs_every_block(owner: Any, given: dict[str, Any]) -> bool:
    """Return whether blocks are computed one by one.

    With layerdrop, the stock code skips a block by not calling its module.
    """
    has_layerdrop = owner.training and bool(getattr(owner, "layerdrop", 0))
    return wants("output_hidden_states", given, owner.config) or has_layerdrop


def _uses_cache(owner: Any, given: dict[str, Any]) -> bool:
    """Return whether the stock model returns a cache for these arguments, and makes one if none is given."""
    if getattr(owner, "gradient_checkpointing", False) and owner.training:
        return False
    use_cache = given.get("use_cache")
    return bool(getattr(owner.config, "use_cache", False) if use_cache is None else use_cache)


def _positions(position_ids: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the positions that separate packed sequences, [batch, tokens], and the positions that blocks get.

    Models of Qwen2-VL's kind pass [axes, batch, tokens], or [1 + axes, batch, tokens] with the places in the text
    first. Blocks get [batch, tokens] where all axes are equal, as in text, and otherwise [batch, tokens, axes].
    """
    if position_ids is None or position_ids.dim() == 2:
        return position_ids, position_ids
    has_text = len(position_ids) == 1 + _AXES
    axes = position_ids[1:] if has_text else position_ids
    are_equal = bool((axes == axes[:1]).all())
    return position_ids[0] if has_text else None, axes[0] if are_equal else axes.permute(1, 2, 0)
