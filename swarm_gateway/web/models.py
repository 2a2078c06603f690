"""The models that are served, and their loading at the first request."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from swarm_client.batching.loop import GenerationLoop
from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_client.generation.fewest_tokens import FewestTokens
from swarm_client.generation.opening import tokenizer_at
from swarm_client.model.model import DistributedModel
from swarm_client.weights.opening import ModelOpening
from swarm_gateway.answers.capabilities import capabilities_of
from swarm_gateway.grammars.compiler import GrammarCompiler
from swarm_gateway.history.recorder import HistoryRecorder
from swarm_gateway.limits.admission import ApiError
from swarm_gateway.monitor.model_monitor import ModelStatus
from swarm_gateway.monitor.monitor import Monitor
from swarm_gateway.web.pictures import PictureReader, picture_reader_at
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import FROM_SWARM, locate
from swarm_models.checkpoints.family import max_positions, sees
from swarm_models.checkpoints.files import is_plain
from swarm_protocol.errors import CheckpointError, SwarmError, UnsupportedModel
from swarm_protocol.wire.printable import printable

if TYPE_CHECKING:
    from swarm_client.model.hf_model import RemoteModelMixin

_logger = logging.getLogger(__name__)
_MOST_LOADED = 16  # each has embeddings and a head in memory, and any server may announce a model
_LOOK_EVERY_S = 10.0  # the shortest time between two reads of the swarm's servers
_ADAPTER = ":"  # between the names of a model and of an adapter


@dataclass(frozen=True)
class ServedModel:
    """A loaded model, with everything that requests need.

    Attributes:
        max_positions: the most positions of prompt and answer together; None if there is no limit.
        pictures: the reader of prompts with pictures; None if the model takes text alone.
        embed: a function from token ids to the mean, over positions, of the input of the model's head.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    batcher: GenerationLoop
    max_positions: int | None
    generation_config: GenerationConfig
    vocab_size: int
    embed: Callable[[Sequence[int]], Awaitable[list[float]]]
    pictures: PictureReader | None = None

    @cached_property
    def fewest_tokens(self) -> FewestTokens:
        return FewestTokens(self.tokenizer)

    def check_length(self, text: str, param: str) -> None:
        """Raise ApiError if the text certainly has more tokens than the model has positions; do not tokenize it."""
        if self.max_positions is not None and self.fewest_tokens.exceeds(text, self.max_positions):
            message = f"the model has {self.max_positions} positions: a text of {len(text)} characters has more tokens"
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def check_tokens(self, token_ids: Iterable[int], param: str) -> None:
        """Raise ApiError if a token id is outside the vocabulary."""
        if any(not 0 <= token < self.vocab_size for token in token_ids):
            raise ApiError(400, f"{param}: the model's token ids are below {self.vocab_size}", param=param)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        own = self.tokenizer.eos_token_id
        ends = end_ids(self.generation_config) or ([] if own is None else [own])
        return GrammarCompiler(self.tokenizer, self.vocab_size, ends)


def end_ids(config: GenerationConfig) -> list[int]:
    """Return the tokens with which a generation ends."""
    ends = config.eos_token_id
    return list(ends) if isinstance(ends, list) else [] if ends is None else [ends]


@dataclass(frozen=True)
class Traits:
    """The traits of a model that its files show before it is loaded."""

    has_template: bool
    capabilities: tuple[str, ...]
    max_positions: int | None


def not_found(name: str) -> ApiError:
    return ApiError(
        404,
        f"there is no model {printable(name)!r}: /v1/models lists those that there are",
        param="model",
        code="model_not_found",
    )


def check_model(model: str, revision: str | None, config: ClientConfig) -> tuple[str, str]:
    """Check that a client can read its part of ``model``. The swarm is needed only if its members send the files.

    Returns:
        The name to use for the model from now on, and the place of its files. The name includes the GGUF file that was
        chosen for a model on the hub, or is the model's name in the swarm.

    Raises:
        CheckpointError: the model or its tokenizer cannot be read, or lacks something; UnsupportedModel: the model
            cannot be split. NoSwarm: members have to send the files, and nobody answers.
    """
    with contextlib.closing(ModelOpening(config)) as opening:
        checkpoint = opening.open(model, revision)
        tokenizer_at(checkpoint.location, checkpoint.revision)
        checkpoint.client_tensors()
    if Path(locate(model)).expanduser().exists():
        return model, checkpoint.location
    prefix = FROM_SWARM if model.startswith(FROM_SWARM) else ""
    return f"{prefix}{checkpoint.name}", checkpoint.location


def mean_hidden(model: Any, token_ids: Sequence[int]) -> list[float]:
    """Return the mean over positions of the last hidden states after the final norm: hidden_size numbers."""
    with torch.no_grad():
        output = model.base_model(torch.tensor([token_ids], device=model.device), use_cache=False, return_dict=True)
    hidden: torch.Tensor = output.last_hidden_state  # [1, tokens, hidden_size]
    return hidden[0].float().mean(0).tolist()


@dataclass(frozen=True)
class _Source:
    """The place where ``from_pretrained`` finds a model; ``files`` is the tokenizer's place if it differs."""

    location: str
    revision: str | None = None
    adapter: str = ""
    files: str = ""

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raise CheckpointError if it cannot be read."""
        return tokenizer_at(self.files or self.location, self.revision)

    def traits(self) -> Traits:
        """Return what the files say. Raise CheckpointError or UnsupportedModel, see ``ModelCheckpoint.open``."""
        tokenizer = self.tokenizer()
        checkpoint = ModelCheckpoint.open(locate(self.files or self.location), self.revision)
        capabilities = capabilities_of(tokenizer, sees=sees(checkpoint.whole_config))
        return Traits(bool(tokenizer.chat_template), tuple(capabilities), max_positions(checkpoint.config))


class SwarmModels:
    """The chosen model, and all others of its swarm. Each is loaded once, however many requests ask at the same time.

    One event loop must make all calls. ``close`` leaves the swarm.
    """

    def __init__(
        self,
        config: ClientConfig,
        model: str,
        revision: str | None,
        make_batcher: Callable[[RemoteModelMixin], GenerationLoop],
        *,
        files: str = "",
        load: Callable[..., RemoteModelMixin] = DistributedModel.from_pretrained,
        monitor: Monitor | HistoryRecorder | None = None,
    ) -> None:
        """Reach the swarm by ``load`` and ``monitor``; ``close`` closes ``monitor``. ``_Source`` explains ``files``."""
        location = Path(locate(model)).expanduser()
        self._config, self._make_batcher, self._load_model = config, make_batcher, load
        self.own_is_directory = location.exists()
        # The name in the swarm's records.
        self.own = location.resolve().name if self.own_is_directory else model.removeprefix(FROM_SWARM)
        self._own_source = _Source(model, revision, files=files)
        self._sources = {self.own: self._own_source}
        self._loading: dict[str, asyncio.Future[ServedModel]] = {}
        self._traits: dict[_Source, Traits] = {}
        # Separate threads, because the event loop's default threads must not wait for the swarm.
        self._threads = concurrent.futures.ThreadPoolExecutor(_MOST_LOADED, "models")
        self._opened = contextlib.ExitStack()  # what ``close`` closes
        self._monitor: Monitor | HistoryRecorder = monitor or Monitor(config)
        self._look: asyncio.Task[None] | None = None
        self._looked_s = 0.0

    async def names(self) -> list[str]:
        await self._see_swarm()
        return list(self._sources)

    async def traits(self, name: str, *, wait: bool = True) -> Traits | None:
        """Return the traits of a model; None if they are unknown at present, or the model is not served any more.

        Without ``wait``, return what is known already, or can be read at once.
        """
        if name not in self._sources:  # another request may have read the swarm since ``names`` was called
            return None
        source = replace(self._sources[name], adapter="")
        if source not in self._traits and (wait or source == self._own_source):
            try:
                read = asyncio.get_running_loop().run_in_executor(self._threads, source.traits)
                self._traits[source] = await read
            except (CheckpointError, UnsupportedModel) as error:
                _logger.info("the files of %s cannot be read: %s", printable(name), error)
        return self._traits.get(source)

    async def get(self, name: str) -> ServedModel:
        """Return the loaded model.

        Raises:
            ApiError: there is no such model.
            SwarmError: the model cannot be loaded at present.
        """
        name = self.own if name == self._own_source.location else name  # users may name it as on the command line
        if name not in self._loading:  # a loaded model goes on even if no server announces it at present
            if name not in self._sources:
                await self._see_swarm()
            if name not in self._sources:
                raise not_found(name)
        loading = self._loading.get(name)
        if loading is None:
            if len(self._loading) >= _MOST_LOADED:
                raise ApiError(503, f"{_MOST_LOADED} models are loaded, which are as many as this server takes")
            loop = asyncio.get_running_loop()
            loading = loop.run_in_executor(self._threads, self._load, name, self._sources[name])
            self._loading[name] = loading
            loading.add_done_callback(lambda done: self._forget_failure(name, done))
        return await asyncio.shield(loading)  # others may wait for it too

    def close(self) -> None:
        """Close all models and leave the swarm; call this after all requests, from a thread without an event loop."""
        self._threads.shutdown(cancel_futures=True)  # waits for models that are being loaded, to close them too
        self._opened.close()
        background.run(self._monitor.close())

    def _load(self, name: str, source: _Source) -> ServedModel:
        tokenizer, pictures = source.tokenizer(), None
        config = replace(self._config, adapter=source.adapter) if source.adapter else self._config
        model = self._load_model(source.location, config=config, revision=source.revision)
        self._opened.callback(model.close)
        batcher = self._make_batcher(model)
        self._opened.callback(batcher.close)
        if sees(model.config):
            pictures = picture_reader_at(source.files or source.location, source.revision)
            if pictures is not None and not tokenizer.chat_template:
                tokenizer.chat_template = pictures.chat_template
        return ServedModel(
            name=name,
            tokenizer=tokenizer,
            batcher=batcher,
            max_positions=model.blocks.max_positions,
            generation_config=model.generation_config,
            vocab_size=model.config.get_text_config().vocab_size,
            embed=partial(self._embed, model),
            pictures=pictures,
        )

    async def _embed(self, model: RemoteModelMixin, token_ids: Sequence[int]) -> list[float]:
        context = contextvars.copy_context()  # it has the current trace
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, context.run, mean_hidden, model, token_ids
        )

    def _forget_failure(self, name: str, done: asyncio.Future[ServedModel]) -> None:
        if done.cancelled() or done.exception() is not None:
            del self._loading[name]

    async def _see_swarm(self) -> None:
        """Read what the swarm's servers announce, unless a recent result is known."""
        if self._look is None and (not self._looked_s or time.monotonic() - self._looked_s > _LOOK_EVERY_S):
            self._look = asyncio.create_task(self._read_swarm())
        if self._look is not None:
            await asyncio.shield(self._look)

    async def _read_swarm(self) -> None:
        try:
            snapshot = await asyncio.wrap_future(background.submit(self._monitor.look()))
        except (SwarmError, OSError, concurrent.futures.CancelledError) as error:
            _logger.warning("the swarm's models cannot be read: %s", error)
        else:
            self._sources = {self.own: self._own_source}
            for status in snapshot.models:
                self._sources |= self._offered(status)
        finally:
            self._look, self._looked_s = None, time.monotonic()

    def _offered(self, status: ModelStatus) -> dict[str, _Source]:
        """Return the model if servers hold all its blocks, and the model with each adapter that covers all blocks."""
        # The name comes from strangers, and must not be a path.
        if status.missing or not (status.model == self.own or is_plain(status.model)):
            return {}
        if status.model == self.own:
            plain = self._own_source
        else:  # the revision of a directory or file is a fingerprint, and is not used for loading
            is_here = Path(locate(status.model)).exists()
            plain = _Source(status.model, None if is_here else status.revision or None)
        found = {status.model: plain}
        for adapter in sorted({name for server in status.servers for name in server.record.adapters}):
            having = tuple(server for server in status.servers if adapter in server.record.adapters)
            if not replace(status, servers=having).missing:  # these servers alone hold all blocks
                found[f"{status.model}{_ADAPTER}{adapter}"] = replace(plain, adapter=adapter)
        return found
