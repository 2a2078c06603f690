"""What is given to ``generate`` besides tokens means the same where several come from one pass."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from swarm_client.speculation.generating import Ends, GeneratedText, may_speculate
from swarm_client.speculation.speculation import Speculation
from tests.drafts import Always, KnowingDraft
from tests.unit.client.speculation.stock import LocalSession, local

VOCAB, NEW_TOKENS = 60, 24
PROMPT = torch.randint(3, VOCAB, (1, 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def gpt2() -> Any:
    size = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 100}
    return local(GPT2LMHeadModel, GPT2Config(**size, eos_token_id=None, bos_token_id=None))


@pytest.fixture(scope="module")
def llama() -> Any:
    size = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return local(LlamaForCausalLM, LlamaConfig(**size, **heads, eos_token_id=None, bos_token_id=None, pad_token_id=0))


def written(model: Any, speculation: Speculation, **options: Any) -> list[int]:
    model.speculation = speculation
    output = model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=NEW_TOKENS, do_sample=False, **options
    )
    return output[0].tolist()


@pytest.mark.parametrize(("rows", "length"), [(1, 3), (1, 9), (4, 4)])
@pytest.mark.parametrize("types", [[0, 0, 0, 0, 0], [1, 1, 1, 2, 2], [1, 2, 1, 2, 1]])
def test_token_types(gpt2, types, rows, length):
    options = {"token_type_ids": torch.tensor([types])}
    plain = written(gpt2, Speculation(None), **options)
    speculation = Always(KnowingDraft([plain], 0.8), rows, length)
    assert written(gpt2, speculation, **options) == plain
    assert speculation.stats.right > 5


def test_position_ids_that_begin_elsewhere(gpt2):
    options = {"position_ids": torch.tensor([[3, 4, 5, 6, 9]])}
    plain = written(gpt2, Speculation(None), **options)
    speculation = Always(KnowingDraft([plain], 0.8), 4, 4)
    assert written(gpt2, speculation, **options) == plain
    assert speculation.stats.right > 5


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("at", ["head", "processor"])
def test_a_pass_that_fails_here_leaves_what_is_right_in_the_cache(gpt2, rows, at):
    plain = written(gpt2, Speculation(None))
    cache, calls = DynamicCache(), iter(range(4))

    def fail(*arguments: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return arguments[-1] if at == "processor" else None

    with ExitStack() as stack:
        if at == "head":
            stack.callback(gpt2.lm_head.register_forward_pre_hook(fail).remove)
        processors = LogitsProcessorList([fail] if at == "processor" else [])
        with pytest.raises(KeyboardInterrupt):
            written(
                gpt2, Always(KnowingDraft([plain], 0.7), rows, 3), past_key_values=cache, logits_processor=processors
            )
    length = LocalSession(cache).length
    assert LocalSession(cache).batch_size == 1 and PROMPT.shape[1] < length < len(plain) - 1
    ids = torch.tensor([plain[: length + 1]])
    known = {"past_key_values": cache, "attention_mask": torch.ones_like(ids), "do_sample": False}
    assert gpt2.generate(ids, max_length=len(plain), **known)[0].tolist() == plain


def test_what_nobody_knows_for_further_tokens_is_left_to_the_stock_method(gpt2):
    kwargs = {"use_cache": True, "attention_mask": torch.ones_like(PROMPT), "past_key_values": object()}
    assert may_speculate(PROMPT, gpt2.generation_config, False, kwargs)
    assert not may_speculate(PROMPT, gpt2.generation_config, False, {**kwargs, "mm_token_type_ids": PROMPT})


@pytest.mark.parametrize("num_negative", [3, 7])
def test_hidden_states_of_the_prompt_are_not_those_of_a_negative_one(llama, num_negative):
    """To guide the text away from it, a processor calls the model."""
    negative = torch.randint(3, VOCAB, (1, num_negative), generator=torch.Generator().manual_seed(2))
    options = {
        "guidance_scale": 1.5,
        "negative_prompt_ids": negative,
        "negative_prompt_attention_mask": torch.ones_like(negative),
    }
    plain = written(llama, Speculation(None), **options)
    draft = KnowingDraft([plain], 0.8, num_hidden=PROMPT.shape[1])
    assert written(llama, Always(draft, 2, 4), **options) == plain
    session = draft.sessions[0]
    assert session.ids == plain
    states = torch.cat([hidden for hidden in session.hidden if hidden is not None])
    whole = llama.model(torch.tensor([plain])).last_hidden_state[0, :-1]
    torch.testing.assert_close(states[1:], whole, atol=1e-5, rtol=1e-4)


class Others:
    """Other generations that are under way. ``ends``: how each text ends that was handed over to them."""

    def __init__(self, are_alike: bool) -> None:
        self._are_alike = are_alike
        self.ends: list[Ends] = []

    def is_alone(self) -> bool:
        return False

    def computes_for(self, _model: Any, _config: Any) -> bool:
        return self._are_alike

    def take_over(self, model: Any, text: GeneratedText, ends: Ends, *_: Any) -> torch.Tensor:
        self.ends.append(ends)
        while not text.is_over:
            text.choose(model(text.ids).logits[0, -1])
        return text.ids


@pytest.mark.parametrize(
    ("options", "are_alike", "joins"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"stopping_criteria": [lambda ids, _scores: torch.tensor([ids.shape[1] >= 11])]}, True, False),
        ({"token_type_ids": torch.tensor([[1, 1, 1, 2, 2]])}, True, False),
        ({"position_ids": torch.tensor([[3, 4, 5, 6, 9]])}, True, False),
    ],
    ids=["plain", "computed-otherwise", "ends-otherwise", "token-types", "positions"],
)
def test_only_a_text_that_others_would_compute_alike_is_handed_over(gpt2, monkeypatch, options, are_alike, joins):
    plain = written(gpt2, Speculation(None), **options)
    others = Others(are_alike)
    monkeypatch.setattr(gpt2, "_shared_loop", others)
    assert written(gpt2, Always(KnowingDraft([plain], 0.8), 1, 3), **options) == plain
    assert others.ends == ([Ends(frozenset(), NEW_TOKENS - 1)] if joins else [])
