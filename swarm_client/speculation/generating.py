"""Stock ``generate`` with guesses: its loop over tokens, in which one pass through the servers gives several tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from swarm_client.sessions.session import RemoteSession
from swarm_client.speculation.choosing import SampledRanking, Verified, rank_greedily, verify
from swarm_client.speculation.draft import Guesses, Ranking
from swarm_client.speculation.head_input import HeadInput
from swarm_client.speculation.past import Past
from swarm_client.speculation.policy import MOST_POSITIONS
from swarm_client.speculation.speculation import Guessing
from swarm_models.checkpoints.family import cache_argument_of
from swarm_protocol.errors import PeerBusy, SwarmError
from swarm_protocol.failures import undone_on_error

MOST_SHARING = 2  # sessions of a server; with more, no guesses are verified
_FOLLOWS = {"attention_mask", "position_ids", "cache_position", "logits_to_keep", "use_cache"}  # known from the text
_BY_POSITION = {"attention_mask", "position_ids", "token_type_ids"}  # [1, positions]; can be extended to more tokens
_IN_OUTPUT = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def ranking_of(config: GenerationConfig, processors: LogitsProcessorList, generator: torch.Generator | None) -> Ranking:
    """Return the ranking of guesses. ``generator`` is the one that samples; None if its numbers cannot be predicted."""
    return SampledRanking(processors, generator) if config.do_sample else rank_greedily


def may_speculate(
    input_ids: torch.Tensor, config: GenerationConfig, synced_gpus: bool, model_kwargs: dict[str, Any]
) -> bool:
    """Return whether this generation has one row without padding, and returns nothing but its tokens."""
    mask = model_kwargs.get("attention_mask")
    is_plain = mask is None or (mask.shape == input_ids.shape and bool(mask.all()))
    others = (value for name, value in model_kwargs.items() if name not in _FOLLOWS | _BY_POSITION)
    return (
        len(input_ids) == 1
        and is_plain
        and bool(model_kwargs.get("use_cache"))
        and not any(isinstance(value, torch.Tensor) for value in others)
        and not synced_gpus
        and _writes_only_tokens(config)
    )


def _writes_only_tokens(config: GenerationConfig) -> bool:
    """Return whether the stock loop would only write tokens, one at a time."""
    is_stock = config.prefill_chunk_size is None and not config.is_assistant
    return is_stock and not any(getattr(config, name, None) for name in _IN_OUTPUT)


def _says_nothing_else(model_kwargs: dict[str, Any], cache_argument: str) -> bool:
    """Return whether the text determines all other arguments, such as positions that count from 0."""
    given = {name for name, value in model_kwargs.items() if value is not None}
    positions = model_kwargs.get("position_ids")
    counts = positions is None or torch.equal(positions.cpu(), torch.arange(positions.shape[-1])[None])
    return counts and given <= {*_FOLLOWS, cache_argument}


def has_room(session: RemoteSession) -> bool:
    """Return whether the session's servers are so idle that verifying guesses does not slow other sessions down."""
    return session.num_sharing <= MOST_SHARING


@dataclass(frozen=True)
class Ends:
    """The conditions that end a text: one of the ``stop_ids``, or ``most_tokens`` more tokens."""

    stop_ids: frozenset[int]
    most_tokens: int


@dataclass
class GeneratedText:
    """The text so far. It chooses the next token as ``_sample`` of transformers does."""

    ids: torch.Tensor  # [1, length]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    do_sample: bool
    streamer: BaseStreamer | None
    is_over: bool = False

    def choose(self, logits: torch.Tensor) -> tuple[int, bool]:
        """Choose the next token from logits [vocabulary], append it, and return it as ``verify`` expects."""
        copied = logits[None].to(copy=True, dtype=torch.float32, device=self.ids.device)
        scores = self.processors(self.ids, copied)  # type: ignore[arg-type]
        if self.do_sample:
            token = torch.multinomial(scores.softmax(-1), num_samples=1)
        else:
            token = scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], -1)
        if self.streamer is not None:
            self.streamer.put(token[0].cpu())
        self.is_over = bool(self.criteria(self.ids, None).all())
        return int(token), self.is_over

    def ends(self) -> Ends | None:
        """Return how the text ends; None if it may end in other ways, or is not on the CPU."""
        lengths = [each.max_length for each in self.criteria if type(each) is MaxLengthCriteria]
        stops = [each.eos_token_id.tolist() for each in self.criteria if type(each) is EosTokenCriteria]
        if not lengths or len(lengths) + len(stops) < len(self.criteria) or self.ids.device.type != "cpu":
            return None
        return Ends(frozenset(chain.from_iterable(stops)), min(lengths) - self.ids.shape[1])


class Company(Protocol):
    """The other active generations of a model."""

    def is_alone(self) -> bool:
        """Return whether there are no others."""

    def computes_for(self, model: Any, config: GenerationConfig) -> bool:
        """Return whether the others are computed in the same way as a generation of the calling thread."""

    def take_over(
        self, model: Any, text: GeneratedText, ends: Ends, session: RemoteSession, guessing: Guessing
    ) -> torch.Tensor:
        """Compute the rest of the text together with the others; return the whole text, [1, length]."""


class SpeculativeGeneration:
    """One call of ``generate`` with guesses."""

    def __init__(self, model: Any, text: GeneratedText, session: RemoteSession, guessing: Guessing) -> None:
        self._model, self._text, self._session, self._guessing = model, text, session, guessing
        self._past = Past(session)
        self._most_rows = MOST_POSITIONS
        self._row = 0  # the row of the session from which the text continues

    def run(self, config: GenerationConfig, model_kwargs: dict[str, Any], company: Company) -> torch.Tensor:
        """Return the whole text, [1, length]."""
        self._run_alone(config, model_kwargs, company)
        ends = None if self._text.is_over else self._text.ends()
        if ends is None:
            return self._text.ids
        return company.take_over(self._model, self._text, ends, self._session, self._guessing)

    def _run_alone(self, config: GenerationConfig, model_kwargs: dict[str, Any], company: Company) -> None:
        """Generate until the text is over, or until other generations can share its computation."""
        text, num_hidden = self._text, self._guessing.num_hidden
        with HeadInput(self._model, num_hidden > 0) as head_input:
            if num_hidden:
                model_kwargs["logits_to_keep"] = num_hidden
            is_plain = _says_nothing_else(model_kwargs, self._model._family.cache_argument)
            outputs = self._model._prefill(text.ids, config, model_kwargs, is_first_iteration=True)
            hidden = head_input.of_row(0)  # read before processors run, which may call the model
            text.choose(outputs.logits[0, -1])
            if text.is_over:
                return
            can_join = is_plain and text.ends() is not None and company.computes_for(self._model, config)
            model_kwargs = self._model._update_model_kwargs_for_generation(outputs, model_kwargs)
            self._guessing.begin(int(text.ids[0, -1]), hidden)
            self._past.settle(0, 0)  # the pass of the prompt had no guesses
            del outputs, hidden  # the prompt's logits may be large
            try:
                while not text.is_over and (company.is_alone() or not can_join):
                    alone = company.is_alone() and has_room(self._session)
                    model_kwargs = self._guess_and_verify(head_input, model_kwargs, is_alone=alone)
            finally:  # leave the session as without guesses, also after an error
                self._guessing.end()
                if self._session.batch_size not in (None, 1):
                    self._session.reorder(torch.tensor([self._row]))

    def _guess_and_verify(
        self, head_input: HeadInput, model_kwargs: dict[str, Any], *, is_alone: bool
    ) -> dict[str, Any]:
        """Add the tokens of one pass to the text, and return the stock arguments of the next pass."""
        text = self._text
        # A pass gives one token more than it has right guesses.
        most = text.criteria.max_length - text.ids.shape[1] - 1 if text.criteria.max_length else 0
        guesses = self._guessing.next(most, most_rows=self._most_rows, is_alone=is_alone)
        outputs, guesses = self._pass(guesses, model_kwargs)
        # The states are read before processors run, which may call the model.
        states = [head_input.of_row(row) for row in range(len(outputs.logits))]
        found = self._verified(guesses, outputs.logits)
        hidden, num_new = states[found.row], len(found.token_ids)
        self._guessing.verified(found, None if hidden is None else hidden[:num_new])
        return self._model._update_model_kwargs_for_generation(  # type: ignore[no-any-return]
            outputs, model_kwargs, num_new_tokens=num_new
        )

    def _pass(self, guesses: Guesses, model_kwargs: dict[str, Any]) -> tuple[Any, Guesses]:
        """Run one pass through the servers; if it fails with several rows, run it with the first row alone."""
        rows = max(1, guesses.num_rows)
        if guesses.length:
            self._past.keep()
        if rows > 1 or self._session.batch_size != 1:  # all rows continue from the row whose guesses were right
            self._session.reorder(torch.full((rows,), self._row))
            self._row = 0
        if rows == 1:
            return self._forward(guesses, model_kwargs), guesses
        try:
            with self._session.with_optional_rows():
                return self._forward(guesses, model_kwargs), guesses
        except SwarmError as error:
            if isinstance(error, PeerBusy):  # there is no KV room for more rows
                self._most_rows = 1
        self._session.reorder(torch.tensor([0]))
        guesses = self._guessing.only_first_row()
        return self._forward(guesses, model_kwargs), guesses

    def _forward(self, guesses: Guesses, model_kwargs: dict[str, Any]) -> Any:
        ids, kwargs = self._text.ids, dict(model_kwargs)
        if guesses.length:
            ids = torch.cat([ids.expand(guesses.num_rows, -1), guesses.token_ids.to(ids.device)], 1)
            for name in _BY_POSITION:
                kwargs[name] = _longer(kwargs.get(name), ids.shape[1], guesses.num_rows, counts=name == "position_ids")
        # The last token of the text is not in the session yet.
        inputs = self._model.prepare_inputs_for_generation(ids, next_sequence_length=guesses.length + 1, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = guesses.length + 1
        length = self._session.length

        def drop_guesses() -> None:  # as far as the servers have computed them; the text's last token stays
            self._session.crop(max(0, self._session.length - length - 1))

        with undone_on_error(drop_guesses):
            return self._model(**inputs, return_dict=True)

    def _verified(self, guesses: Guesses, logits: torch.Tensor) -> Verified:
        """Verify the guesses. The session keeps the right ones, also if a streamer or a processor raises an error."""
        text = self._text
        length = text.ids.shape[1]

        def settle_chosen() -> None:  # the text has the tokens that were chosen before the error
            chosen = text.ids[0, length:].tolist()
            known = torch.tensor(chosen[:-1], dtype=guesses.token_ids.dtype)
            rows = (guesses.token_ids[:, : len(known)] == known).all(1).nonzero().flatten().tolist()
            self._settle(Verified(chosen or [-1], rows[0] if rows else 0), guesses)  # -1: no token, and no right guess

        with undone_on_error(settle_chosen):
            found = verify(guesses, logits, text.choose)
        self._settle(found, guesses)
        return found

    def _settle(self, found: Verified, guesses: Guesses) -> None:
        self._row = found.row
        self._past.settle(guesses.length, found.num_right)


def speculative_sample(
    model: Any,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    synced_gpus: bool,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> torch.Tensor | GenerateDecoderOnlyOutput | None:
    """Return what ``_sample`` of transformers returns for these arguments; None if there are no guesses for them."""
    cache = model_kwargs.get(model._family.cache_argument)
    if (
        model.speculation.draft is None
        or cache is None
        or not may_speculate(input_ids, config, synced_gpus, model_kwargs)
    ):
        return None
    # The numbers of another device's generator cannot be predicted here.
    generator = torch.default_generator if input_ids.device.type == "cpu" else None
    guessing = model.speculation.begin(input_ids[0].tolist(), ranking_of(config, processors, generator))
    if guessing is None:
        return None
    text = GeneratedText(input_ids, processors, criteria, bool(config.do_sample), streamer)
    with model._optimize_model_for_decode():
        generation = SpeculativeGeneration(model, text, model._session_in(cache), guessing)
        ids = generation.run(config, model_kwargs, model._shared_loop)
    if streamer is not None:
        streamer.end()
    if config.return_dict_in_generate:
        kept = {cache_argument_of(GenerateDecoderOnlyOutput): cache}
        return GenerateDecoderOnlyOutput(sequences=ids, **kept)  # type: ignore[arg-type]
    return ids


def _longer(values: torch.Tensor | None, length: int, num_rows: int, *, counts: bool) -> torch.Tensor | None:
    """Extend values per position, [1, positions], to [num_rows, length]; repeat the last value, or count on."""
    if values is None:
        return None
    new = values[:, -1:].expand(1, length - values.shape[1])
    if counts:
        new = new + torch.arange(1, new.shape[1] + 1, device=values.device)
    return torch.cat([values, new], -1).expand(num_rows, -1)
