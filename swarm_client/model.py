"""Stock Hugging Face models whose blocks are remote."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import AsyncIterable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarm_client import background
from swarm_client.cache import RemoteCache, session_of
from swarm_client.config import ClientConfig
from swarm_client.events import OnEvent
from swarm_client.head import check_head_quant, float_head, quantize_head_
from swarm_client.remote_blocks import RemoteBlocks, RemoteSpan
from swarm_client.swarm import Swarm
from swarm_protocol.checkpoint import Checkpoint
from swarm_protocol.default_model import DEFAULT_MODEL, locate
from swarm_protocol.errors import RequestRejected, UnsupportedModel
from swarm_protocol.families import Family, slice_config
from swarm_protocol.notes import DEFAULT_SWARM
from swarm_protocol.positions import max_positions
from swarm_protocol.shell import stock_loader
from swarm_protocol.span import Span

_logger = logging.getLogger(__name__)
_ATTENTION = "swarm_remote"
_NEW_HEADS = ("score.", "classifier.")  # of classifiers that are still to be trained


def _tiny_mask(*_args: Any, batch_size: int = 1, device: Any = None, **_kwargs: Any) -> torch.Tensor:
    """Blocks build their own masks where they run; the client's is never looked at."""
    return torch.ones(batch_size, 1, 1, 1, dtype=torch.bool, device=device)


def _no_attention(*_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError("attention of remote blocks is computed on the servers")


ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, _tiny_mask)
ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _no_attention)


class _Distributed:
    _auto_class: Any

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str = DEFAULT_MODEL,
        initial_peers: list[str] | tuple[str, ...] | None = None,
        swarm: str | None = None,
        *,
        revision: str | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        wait_timeout_s: float = ClientConfig.wait_timeout_s,
        step_timeout_s: float = ClientConfig.step_timeout_s,
        recovery_timeout_s: float = ClientConfig.recovery_timeout_s,
        standby: bool = ClientConfig.standby,
        on_event: OnEvent | None = None,
        compression: str = ClientConfig.compression,
        head_quant: str = ClientConfig.head_quant,
        allowed_servers: Sequence[str] = (),
        blocked_servers: Sequence[str] = (),
        **config_overrides: Any,
    ) -> PreTrainedModel:
        """Loads embeddings, norms and head; the blocks are computed by the swarm.

        Args:
            name_or_path: hub name, directory, or the name of the model that ships with this package.
            initial_peers: multiaddrs of members of the swarm; by default the swarm noted on this machine.
            swarm: the swarm's name.
            revision: branch, tag or commit of a hub model. Servers must serve the same.
            dtype: of the client's part; "auto" is float32 on the CPU and the checkpoint's own elsewhere.
            wait_timeout_s: how long to wait for servers that hold every block before ``NoRoute``.
            step_timeout_s: how long to wait for one server's answer, as long as it says that it is there.
            recovery_timeout_s: how long a generation or a training step waits until others have taken the place of
                servers that failed, before ``RecoveryFailed``; 0 lets it fail at once.
            standby: keep a copy of each generation's keys and values on other servers, so that next to nothing must be
                computed again when one fails. It costs their room and the network between them.
            on_event: called with what happens to generations and training: ``swarm_client.events.Recovery``, ``Move``,
                ``Waiting``, ``Retry``. It runs on the network's thread and must not hold it up.
            compression: of hidden states on their way to the servers: "none" or "int8".
            head_quant: of the head that turns hidden states into logits: "none", or "int8" (on the CPU), which is
                faster and smaller, and frozen. A classifier's head stays as it is.
            allowed_servers, blocked_servers: peer ids, or their ends as ``status`` shows them. If any are allowed, no
                others are used.
            config_overrides: fields of the model's config, such as ``num_labels=3``.

        Returns:
            The stock class (such as ``LlamaForCausalLM``) with ``model.blocks`` and ``model.close()`` added; it also is
            a context manager.

        Raises:
            CheckpointError: the model cannot be read; UnsupportedModel: it cannot be split.
            NoSwarm: no member of the swarm answers.
        """
        config = ClientConfig(
            initial_peers=tuple(initial_peers or ()) if not isinstance(initial_peers, str) else initial_peers,
            swarm=swarm or DEFAULT_SWARM,
            wait_timeout_s=wait_timeout_s,
            step_timeout_s=step_timeout_s,
            recovery_timeout_s=recovery_timeout_s,
            standby=standby,
            on_event=on_event,
            compression=compression,
            head_quant=head_quant,
            allowed_servers=allowed_servers if isinstance(allowed_servers, str) else tuple(allowed_servers),
            blocked_servers=blocked_servers if isinstance(blocked_servers, str) else tuple(blocked_servers),
        )
        device = torch.device(device)
        check_head_quant(head_quant, device)
        checkpoint = Checkpoint.open(locate(name_or_path), revision)
        connection = Swarm(config, checkpoint.name, checkpoint.revision, checkpoint.family.num_blocks)
        background.run(connection.connect())
        try:
            model = load_client(checkpoint, cls._auto_class, dtype, device, config_overrides)
            if head_quant == "int8":
                quantize_head_(model)
        except BaseException:
            background.run(connection.close())
            raise
        model.connect(RemoteSpan(connection, checkpoint.family.all_blocks, max_positions(checkpoint.config)))
        return model


class DistributedModel(_Distributed):
    """``AutoModelForCausalLM`` for a swarm."""

    _auto_class = AutoModelForCausalLM


class DistributedModelForSequenceClassification(_Distributed):
    """``AutoModelForSequenceClassification`` for a swarm."""

    _auto_class = AutoModelForSequenceClassification


class RemoteModelMixin:
    """What a distributed model has besides the stock class."""

    _remote_blocks: list[RemoteBlocks]  # in a list: it is registered where the blocks were

    def connect(self, remote: RemoteSpan) -> None:
        """Gives the model its remote blocks."""
        self._remote_blocks[0].connect(remote)

    @property
    def blocks(self) -> RemoteSpan:
        """The remote blocks: ``model.blocks[6:10](hidden)``."""
        return self._remote_blocks[0].remote

    def new_cache(self, reserve_tokens: int = 0, **options: Any) -> RemoteCache:
        """An empty cache to pass as ``past_key_values``; its ``session`` has ``stats`` and can be resumed.

        The arguments are those of ``RemoteSpan.open_session``: ``standby`` and ``on_event`` among them.
        """
        return RemoteCache(self.blocks, reserve_tokens, **options)

    def close(self) -> None:
        """Leaves the swarm; the model cannot compute afterwards."""
        background.run(self.blocks.swarm.close())

    def __enter__(self):
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def generate(self, *args: Any, streamer: Any = None, **kwargs: Any) -> Any:
        """The stock ``generate``; if it fails, whoever iterates over the streamer in another thread is let go."""
        try:
            return super().generate(*args, streamer=streamer, **kwargs)
        except BaseException:
            if isinstance(streamer, Iterable | AsyncIterable):
                streamer.end()
            raise

    # The stock methods, to which a head in int8 shows itself as the float head it replaced.

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        with float_head(self):
            super().tie_weights(*args, **kwargs)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        with float_head(self):
            return super().resize_token_embeddings(*args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        with float_head(self):
            return super().save_pretrained(*args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        """Called by ``generate``: gives it a remote cache where it would make a local one."""
        limit = self.blocks.max_positions
        if limit is not None and max_cache_length > limit:
            raise RequestRejected(
                f"prompt and new tokens need {max_cache_length} positions, but the model has {limit}: "
                "shorten the prompt or ask for fewer new tokens"
            )
        fresh = model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False
        if fresh:
            model_kwargs["past_key_values"] = RemoteCache(self.blocks, reserve_tokens=max_cache_length)
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if fresh:
            model_kwargs["past_key_values"]._is_user_defined = False


def load_client(
    checkpoint: Checkpoint,
    auto_class: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    config_overrides: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """The client's half of a model, with unconnected remote blocks.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the model.
        UnsupportedModel: there is no such head for this model.
    """
    family, config = checkpoint.family, copy.deepcopy(checkpoint.config)
    for name, value in (config_overrides or {}).items():
        if not hasattr(config, name):
            raise ValueError(
                f"unexpected argument {name!r}: from_pretrained does not know it, nor does the model's config"
            )
        setattr(config, name, value)
    try:
        stock_class = auto_class._model_mapping[type(config)]
    except KeyError:
        raise UnsupportedModel(f"models of type {config.model_type!r} have no {auto_class.__name__}") from None
    if dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else config.dtype or torch.bfloat16
    client_class = _client_class(stock_class, family)
    one_block = slice_config(config, Span(0, 1))
    if hasattr(config, "layer_types"):
        one_block.layer_types = config.layer_types  # rotary embeddings are made for every type of block among them
    with stock_loader():
        model, info = client_class.from_pretrained(
            None,
            config=one_block,
            state_dict=checkpoint.client_tensors(),
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below
        )
    for name in checkpoint.require_fit(info, optional=() if auto_class is AutoModelForCausalLM else _NEW_HEADS):
        _logger.warning("%s is not in the checkpoint: it starts untrained", name)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = config
    config._attn_implementation_internal = _ATTENTION
    if checkpoint.generation_config is not None:
        model.generation_config = checkpoint.generation_config
    return model.eval().to(device)


def _client_class(stock_class: type[PreTrainedModel], family: Family) -> type[PreTrainedModel]:
    """The stock class with remote blocks in the place of its own."""

    class Client(RemoteModelMixin, stock_class):
        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            base = next(module for module in self.modules() if isinstance(module, family.base_class))
            owner = family.owner_of(base)
            block_class = type(getattr(owner, family.blocks)[0])
            blocks = _as_block(block_class)(family.returns_tuple)
            setattr(owner, family.blocks, nn.ModuleList([blocks]))
            self._remote_blocks = [blocks]
            owner.register_forward_pre_hook(_context_hook(owner, blocks), with_kwargs=True)

        @functools.wraps(stock_class.forward)  # transformers looks at its signature
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with self._remote_blocks[0].only_last(_num_wanted(self.config, kwargs)):
                return super().forward(*args, **kwargs)

    # Both names: transformers skips its weight conversions for classes that look like a user's own.
    Client.__name__, Client.__qualname__ = stock_class.__name__, stock_class.__qualname__
    Client.__module__ = stock_class.__module__
    return Client


def _num_wanted(config: PreTrainedConfig, arguments: dict[str, Any]) -> int | None:
    """How many of the last hidden states a forward with these arguments uses; None: all."""
    num_kept = arguments.get("logits_to_keep")
    returns_hidden = arguments.get("output_hidden_states")
    if returns_hidden or (returns_hidden is None and config.output_hidden_states):
        return None
    return num_kept if isinstance(num_kept, int) and num_kept > 0 else None


def _as_block(block_class: type[nn.Module]) -> type[RemoteBlocks]:
    """RemoteBlocks that also is a ``block_class``: transformers records hidden states of modules by their class."""
    return type("RemoteBlocks", (RemoteBlocks, block_class), {})


def _context_hook(owner: nn.Module, blocks: RemoteBlocks):
    """Tells the remote blocks mask, positions and cache of each forward of their owner.

    They are caught at the owner because what it hands to a block differs between families.
    """
    names = list(inspect.signature(owner.forward).parameters)

    def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        cache = given.get("past_key_values")
        if cache is None and given.get("use_cache") is not False and not torch.is_grad_enabled():
            cache = RemoteCache(blocks.remote)
        session = None if cache is None else session_of(cache, blocks.remote)
        blocks.set_context(given.get("attention_mask"), given.get("position_ids"), session)
        return (), {**given, "past_key_values": cache, "use_cache": cache is not None}

    return hook
