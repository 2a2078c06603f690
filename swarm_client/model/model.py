"""Stock Hugging Face models whose blocks are remote."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from swarm_client.adapters.prompts import NEW_HEADS
from swarm_client.core import background
from swarm_client.core.config import ClientConfig, Timeouts
from swarm_client.core.draft_names import check_draft_name
from swarm_client.core.events import OnEvent
from swarm_client.drafts.opening import open_speculation
from swarm_client.model.head import check_head_quant, quantize_head_
from swarm_client.model.hf_model import ATTENTION, RemoteModelMixin, client_class
from swarm_client.model.progress import reading_shown
from swarm_client.weights.opening import ModelOpening
from swarm_protocol.checkpoints.checkpoint import Checkpoint
from swarm_protocol.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.checkpoints.family import max_positions, slice_config
from swarm_protocol.checkpoints.hollow_model import hf_loader
from swarm_protocol.errors import UnsupportedModel
from swarm_protocol.span import Span

_logger = logging.getLogger(__name__)
NUM_PROMPT_TOKENS = 16


class _Distributed:
    _auto_class: Any

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str = DEFAULT_MODEL,
        initial_peers: list[str] | tuple[str, ...] | None = None,
        swarm: str | None = None,
        *,
        config: ClientConfig | None = None,
        revision: str | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        wait_timeout_s: float | None = None,
        step_timeout_s: float | None = None,
        recovery_timeout_s: float | None = None,
        standby: bool | None = None,
        on_event: OnEvent | None = None,
        compression: str | None = None,
        compression_error: float | None = None,
        head_quant: str | None = None,
        draft: str | None = None,
        allowed_servers: Sequence[str] | None = None,
        blocked_servers: Sequence[str] | None = None,
        adapter: str | None = None,
        check_share: float | None = None,
        timeouts: Timeouts | None = None,
        swarm_key: str | None = None,
        membership: str | os.PathLike[str] | None = None,
        identity: str | os.PathLike[str] | None = None,
        tuning_mode: str | None = None,
        num_prompt_tokens: int = NUM_PROMPT_TOKENS,
        **config_overrides: Any,
    ) -> RemoteModelMixin:
        """Loads embeddings, norms and head; the blocks are computed by the swarm.

        What concerns the swarm is given as a ``ClientConfig``, or by the keywords that are named like its fields, whose
        defaults are there.

        Args:
            name_or_path: hub name, directory, GGUF file, or a short name that ``default_model.locate`` knows;
                ``swarm://NAME`` for a model whose files members give if they are not on this machine, ``swarm://`` for
                the only one of the swarm. With ``initial_peers``, members also give what the hub does not.
            initial_peers: multiaddrs of members of the swarm; by default the swarm registered on this machine.
            swarm: the swarm's name.
            config: instead of the keywords that are named like its fields.
            revision: branch, tag or commit of a hub model. Servers must serve the same; ``swarm://`` takes the one that
                most of them serve.
            dtype: of the client's part; "auto" is float32 on the CPU and the checkpoint's own elsewhere.
            wait_timeout_s: how long to wait for servers that hold every block before ``NoRoute``, and for room on them
                before ``PeerBusy``.
            step_timeout_s: how long to wait for one server's answer, as long as it says that it is there.
            recovery_timeout_s: how long a generation or a training step waits until others have taken the place of
                servers that failed, before ``RecoveryFailed``; 0 lets it fail at once.
            standby: keep a copy of each generation's keys and values on other servers, so that next to nothing must be
                computed again when one fails. It costs their room and the network between them.
            on_event: called with what happens to generations and training, an event of ``swarm_client.core.events``:
                ``Recovery``, ``Move``, ``Waiting``, ``Retry``, ``WrongAnswers`` or ``DoubtfulTokens``. It runs on the
                network's thread and must not hold it up.
            compression: of hidden states and their gradients on the wire: "raw", "bf16", "int8" or "int4" (4.5 bits).
                "auto", the default, is raw where links are fast enough.
            compression_error: relative error of the last hidden state, measured for this model, that "auto" may cause.
            head_quant: of the head that turns hidden states into logits: "none", or "int8" (on the CPU), which is
                faster and smaller, and frozen. A classifier's head stays as it is.
            draft: what guesses the next tokens, which one pass through the servers verifies: "lookup", or the name or
                directory of a small model with the same tokenizer; "none"; or "auto", which guesses where passes are
                slow. The text is the same. See ``model.speculation``.
            allowed_servers: peer ids, or their ends as ``status`` shows them. If any are given, no others are used.
            blocked_servers: the same of servers that are not used.
            adapter: name of an adapter that servers have loaded; only those that have are used.
            check_share: how much of the servers' work in generations is spent on computing answers again, by others who
                are compared with them; more for new servers, and 0 checks nothing. By default 0.025, and 0 in the swarm
                registered on this machine.
            timeouts: of single exchanges with servers.
            swarm_key: of a private swarm, whose members alone are taken for servers. A membership has it already.
            membership: file that makes this client a member of a private swarm; by default, what the environment
                variable SWARM_MEMBERSHIP has in it.
            identity: key file of the peer that the membership is for, if that came without one.
            tuning_mode: "prompt" adds virtual tokens before those of every row, "deep_prompt" others before every block
                too: so many ``num_prompt_tokens``, and nothing else, are trained. See ``model.prompts``.
            config_overrides: fields of the model's config, such as ``num_labels=3``.

        Returns:
            The stock class (such as ``LlamaForCausalLM``) with ``model.blocks`` and ``model.close()`` added; it also is
            a context manager.

        Raises:
            ValueError: a value is out of its range, or ``config`` comes with one of its fields beside it.
            CheckpointError: the model cannot be read; UnsupportedModel: it cannot be split.
            NoSwarm: no member of the swarm answers.
            AccessDenied: the swarm is private, and this client is no member of it; raised by the first pass.
            NoRoute: no server has ``adapter``, or is one of ``allowed_servers``, though there are others.
        """
        config = _client_config(
            config,
            initial_peers=initial_peers,
            swarm=swarm or None,
            wait_timeout_s=wait_timeout_s,
            step_timeout_s=step_timeout_s,
            recovery_timeout_s=recovery_timeout_s,
            standby=standby,
            on_event=on_event,
            compression=compression,
            compression_error=compression_error,
            head_quant=head_quant,
            draft=draft,
            allowed_servers=allowed_servers,
            blocked_servers=blocked_servers,
            adapter=adapter,
            check_share=check_share,
            timeouts=timeouts,
            swarm_key=swarm_key,
            membership=membership,
            identity=identity,
        )
        check_draft_name(config.draft)
        device = torch.device(device)
        check_head_quant(config.head_quant, device)
        with contextlib.closing(ModelOpening(config)) as opening:
            checkpoint = opening.open(name_or_path, revision)
            connection = opening.swarm(checkpoint)
            background.run(connection.connect())
            try:
                model = load_client(checkpoint, cls._auto_class, dtype, device, config_overrides)
                if config.head_quant == "int8":
                    quantize_head_(model)
                model.connect(connection, max_positions(checkpoint.config))
                model.speculation = open_speculation(config.draft, model, checkpoint)
                if tuning_mode is not None:
                    model.add_prompts(tuning_mode, num_prompt_tokens)
            except BaseException:
                background.run(connection.close())
                raise
        return model


class DistributedModel(_Distributed):
    """``AutoModelForCausalLM`` for a swarm."""

    _auto_class = AutoModelForCausalLM


class DistributedModelForSequenceClassification(_Distributed):
    """``AutoModelForSequenceClassification`` for a swarm."""

    _auto_class = AutoModelForSequenceClassification


def _client_config(config: ClientConfig | None, **keywords: Any) -> ClientConfig:
    """``config``, or the one that the keywords fill, of which those that are None were not given."""
    given = {name: value for name, value in keywords.items() if value is not None}
    if config is None:
        return ClientConfig(**given)
    if not isinstance(config, ClientConfig):
        raise ValueError(
            f"config is a {type(config).__name__}: expected a swarm_client.ClientConfig. Fields of the model's own "
            "config are keyword arguments, such as num_labels=3"
        )
    if given:
        name = next(iter(given))
        raise ValueError(f"config and {name} are both given: expected ClientConfig({name}=…), or {name} without config")
    return config


def load_client(
    checkpoint: Checkpoint,
    auto_class: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    config_overrides: dict[str, Any] | None = None,
) -> RemoteModelMixin:
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
        hf_class = auto_class._model_mapping[type(config)]
    except KeyError:
        raise UnsupportedModel(f"models of type {config.model_type!r} have no {auto_class.__name__}") from None
    if dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else config.dtype or torch.bfloat16
    own_class = client_class(hf_class, family)
    one_block = slice_config(config, Span(0, 1))
    if hasattr(config, "layer_types"):
        one_block.layer_types = config.layer_types  # rotary embeddings are made for every type of block among them
    with hf_loader(), reading_shown(checkpoint.client_tensors()) as tensors:
        loaded: Any = own_class.from_pretrained(
            None,
            config=one_block,
            state_dict=tensors,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below
        )
    model: RemoteModelMixin
    model, info = loaded  # a pair because of output_loading_info, of which transformers' annotations do not know
    for name in checkpoint.require_fit(info, optional=() if auto_class is AutoModelForCausalLM else NEW_HEADS):
        _logger.warning("%s is not in the checkpoint: it starts untrained", name)
    model.fill_blocks(config)
    module: Any
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = config
    config._attn_implementation_internal = ATTENTION
    if checkpoint.generation_config is not None:
        model.generation_config = checkpoint.generation_config
    model.name_or_path = str(checkpoint.location)  # adapters say what they were made for
    return model.eval().to(device)
