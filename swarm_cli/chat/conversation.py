"""A conversation with a model, in which one session on the servers continues from turn to turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from swarm_cli.chat.answer import printed_answer
from swarm_client.generation.templates import first_tokens, render
from swarm_client.generation.text_options import TextOptions
from swarm_protocol.failures import undone_on_error

if TYPE_CHECKING:
    from swarm_client.model.hf_model import RemoteModelMixin

Message = dict[str, str]  # "role": system, user or assistant; "content"


class Conversation:
    """The turns so far, and the session with their keys and values. A turn sends only new tokens.

    The tokenizer's chat template joins the turns. Without a template, each line continues the text on a new line. An
    answer's reasoning is printed, and left out of later turns.

    Attributes:
        options: the options for the choice of tokens, from the next answer on.
        system: the system prompt, or an empty string.
        token_ids: the tokens of all turns that the current model has chosen or read.
        cache: the remote cache of the tokens that the model has computed.
    """

    def __init__(self, model: RemoteModelMixin, tokenizer: PreTrainedTokenizerBase, options: TextOptions) -> None:
        self._model, self._tokenizer, self.options = model, tokenizer, options
        self.system = ""
        self._messages: list[Message] = []  # user and assistant alternate
        self._text = ""  # the text of these messages
        self._sent: list[int] = []  # tokens sent to the model; the cache holds the first of them
        self.token_ids: list[int] = []
        self.cache = model.new_cache()
        if options.seed is not None:
            torch.manual_seed(options.seed)

    def answer(self, line: str) -> str:
        """Print the model's answer as it is generated, and return the answer without its reasoning.

        An interruption or an error ends the answer. If the answer is empty then, the turn is taken back.

        Raises:
            ValueError: the model has no room for the line, or its template refuses the line; or the answer has ended
                within its reasoning.
            SwarmError: see ``swarm_protocol.errors``.
        """
        messages = [*self._messages, {"role": "user", "content": line}]
        text = render(self._tokenizer, self._with_system(messages))
        prompt = self._tokens(text)
        arguments = self._arguments(len(prompt))
        known = self.cache.get_seq_length()
        if known >= len(prompt) or prompt[:known] != self._sent[:known]:
            self.cache.session.reset()  # a turn was taken back, or the template has changed earlier ones
        ids = torch.tensor([prompt], device=self._model.device)
        answer = printed_answer(self._tokenizer, prompt, self._ends)
        try:
            with undone_on_error(answer.end):  # whatever is printed next begins on a line of its own
                self._model.generate(ids, attention_mask=torch.ones_like(ids), streamer=answer, **arguments)
        finally:
            self._sent = prompt + answer.token_ids
            turns = [*messages, {"role": "assistant", "content": answer.text}]
            if answer.has_more and answer.text:
                self._replace(turns)  # the next prompt lacks the reasoning, so that it has other tokens
            elif answer.token_ids and not answer.has_more:
                self.token_ids, self._text, self._messages = self._sent, text + answer.text, turns
        if answer.has_more and not answer.text:
            raise ValueError(
                f"the answer has ended within its reasoning, after {len(answer.token_ids)} tokens: "
                "allow more by --max-new-tokens or /set max_new_tokens"
            )
        return answer.text

    def answer_again(self) -> str:
        """Generate the last answer again. If the new answer is empty, the old one stays.

        Raises:
            ValueError: there is no answer yet.
        """
        before = self._messages
        if not before:
            raise ValueError("there is no answer yet that could be written again")
        self._replace(before[:-2])
        try:
            return self.answer(before[-2]["content"])
        finally:
            if len(self._messages) < len(before):
                self._replace(before)

    def reset(self) -> None:
        """Forget all turns. The system prompt stays."""
        self._replace([])
        self._sent = []
        self.cache.session.reset()

    def set_option(self, name: str, value: Any) -> None:
        """Set a field of ``options``. A seed makes sampling repeatable from now on."""
        self.options = replace(self.options, **{name: value})
        if name == "seed" and value is not None:
            torch.manual_seed(value)

    def set_system(self, text: str) -> None:
        """Set the system prompt. Raise ValueError if the template takes none."""
        if text and not self.has_template:
            raise ValueError("this model has no chat template, and so takes no system prompt")
        if text:
            render(self._tokenizer, [{"role": "system", "content": text}, {"role": "user", "content": "?"}])
        self.system = text
        self._replace(self._messages)

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def messages(self) -> list[Message]:
        """Return the system prompt, if there is one, and all turns."""
        return self._with_system(self._messages, always=True)

    def load(self, messages: list[Message]) -> None:
        """Replace the system prompt and all turns."""
        self.system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
        self._replace([message for message in messages if message["role"] != "system"])

    def move(self, model: RemoteModelMixin, tokenizer: PreTrainedTokenizerBase) -> None:
        """Continue with another model, which reads all turns at the next turn."""
        old = self.cache
        self._model, self._tokenizer, self.cache, self._sent = model, tokenizer, model.new_cache(), []
        self._replace(self._messages)
        old.session.close()

    def _replace(self, messages: list[Message]) -> None:
        """Set the messages; their tokens are computed again at the next turn."""
        self._messages, self._text, self.token_ids = messages, "", []

    def _with_system(self, messages: list[Message], *, always: bool = False) -> list[Message]:
        if self.system and (self.has_template or always):
            return [{"role": "system", "content": self.system}, *messages]
        return messages

    def _tokens(self, text: str) -> list[int]:
        """Return the tokens of all turns. The model's own tokens stay, even if a tokenizer splits them otherwise."""
        if not self._text or not text.startswith(self._text):  # templates may shorten earlier turns
            return first_tokens(self._tokenizer, text)
        known = self.token_ids
        if known[-1] in self._tokenizer.all_special_ids:  # the answer's end token; the template defines how a turn ends
            known = known[:-1]
        return known + list(self._tokenizer(text.removeprefix(self._text), add_special_tokens=False).input_ids)

    @property
    def _ends(self) -> list[int]:
        """Return the tokens that end an answer."""
        ends = self._model.generation_config.eos_token_id
        return [self._tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]

    def _arguments(self, num_tokens: int) -> dict[str, Any]:
        """Return the arguments for ``generate``, with at most as many new tokens as there are positions left."""
        if num_tokens == 0:
            raise ValueError("the line has no tokens: expected some text")
        arguments = {self._model._family.cache_argument: self.cache, **self.options.as_arguments()}
        limit = self._model.blocks.max_positions
        if limit is None:
            return arguments
        left = limit - num_tokens - (0 if self._model.prompts is None else self._model.prompts.num_tokens)
        if left < 1:
            raise ValueError(
                f"with this, the conversation has {num_tokens} tokens, and the model only {limit} positions: "
                "/reset starts over"
            )
        return arguments | {"max_new_tokens": min(self.options.max_new_tokens, left)}
