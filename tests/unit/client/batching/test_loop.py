"""Generations of one loop beside a model whose blocks are in this process: what each writes, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from swarm_client.batching.loop import GenerationLoop
from swarm_client.batching.request import FinishReason, Item, Request, Scored, Token
from swarm_client.speculation.speculation import Speculation
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.wire.block_input import BlockInput
from tests.unit.support import TIMEOUT_S

VOCAB, HIDDEN = 60, 16
REQUEST: ContextVar[str] = ContextVar("request", default="none")
PROMPTS = ((5, 6, 7), (8,), (9, 10, 11, 12, 13))


def blocks(hidden: torch.Tensor) -> torch.Tensor:
    """Every output depends on all inputs up to it; hidden: [1, length, hidden_size]."""
    return torch.sin(hidden.cumsum(1))


class Session:
    """What the loop needs of a ``RemoteSession``. ``left``: steps until it fails; None: it does not."""

    hops = (object(),)
    records_past = False
    num_sharing = 1

    def __init__(self, left: int | None) -> None:
        self.closed = threading.Event()
        self.requests: set[str] = set()  # for which it has computed
        self._left = left
        self._inputs = torch.empty(1, 0, HIDDEN)

    @property
    def length(self) -> int:
        return self._inputs.shape[1]

    async def step_on_loop(self, inputs: BlockInput, num_wanted: int) -> torch.Tensor:
        self.requests.add(REQUEST.get())
        if self._left == 0:
            raise PeerUnavailable("the server is on fire")
        self._left = None if self._left is None else self._left - 1
        self._inputs = torch.cat([self._inputs, inputs.hidden], 1)
        return blocks(self._inputs)[:, -num_wanted:]

    async def close_on_loop(self) -> None:
        self.closed.set()


class Model(LlamaForCausalLM):
    """A stock head and embedding around remote blocks."""

    prompts = None
    speculation = Speculation(None)
    _family = SimpleNamespace(cache_argument="past_key_values")

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.sessions: list[Session] = []
        self.left: list[int | None] = []  # of the sessions that are opened next
        self.blocks = SimpleNamespace(max_positions=None, open_session=self._open)

    def _open(self, *_: Any, **_options: Any) -> Session:
        self.sessions.append(Session(self.left.pop(0) if self.left else None))
        return self.sessions[-1]

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, past_key_values: Any = None, **_: Any) -> Any:
        inputs = BlockInput(self.get_input_embeddings()(input_ids))
        return SimpleNamespace(logits=self.lm_head(past_key_values.layers[0].session.step(inputs)))

    def alone(self, prompt: tuple[int, ...], num_new: int) -> list[int]:
        """The likeliest tokens after the prompt."""
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(num_new):
                hidden = self.get_input_embeddings()(torch.tensor([ids]))
                ids.append(int(self.lm_head(blocks(hidden))[0, -1].argmax()))
        return ids[len(prompt) :]


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.prompt: list[Token] = []
        self._reason: FinishReason | BaseException | None = None
        self._over = threading.Event()

    def __call__(self, item: Item | BaseException) -> None:
        if isinstance(item, Token):
            self.ids.append(item.id)
        elif isinstance(item, Scored):
            assert not self.ids
            self.prompt = list(item.prompt)
        else:
            self._reason = item
            self._over.set()

    @property
    def reason(self) -> FinishReason | BaseException | None:
        """Once it has ended."""
        assert self._over.wait(TIMEOUT_S)
        return self._reason


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    size = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": 1}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    return Model(LlamaConfig(**size, **ends, num_attention_heads=2, initializer_range=1.0)).eval()


@pytest.fixture
def loop(model: Model) -> Iterator[GenerationLoop]:
    with GenerationLoop(model) as loop:  # type: ignore[arg-type]
        yield loop


def submitted(loop: GenerationLoop, prompt: tuple[int, ...], num_new: int, **options: Any) -> Heard:
    heard = Heard()
    config = GenerationConfig(max_new_tokens=num_new, do_sample=False, **options)
    loop.submit(Request(prompt, config), heard)  # type: ignore[arg-type]
    return heard


def test_each_generation_writes_what_it_writes_alone_and_frees_its_room(model: Model, loop: GenerationLoop) -> None:
    all_heard = [submitted(loop, prompt, 4 + 3 * number) for number, prompt in enumerate(PROMPTS)]
    assert [heard.reason for heard in all_heard] == ["length"] * 3
    assert [heard.ids for heard in all_heard] == [
        model.alone(prompt, 4 + 3 * number) for number, prompt in enumerate(PROMPTS)
    ]
    assert all(session.closed.wait(TIMEOUT_S) for session in model.sessions)


def test_a_generation_ends_with_its_stop_token(model: Model, loop: GenerationLoop) -> None:
    expected = model.alone(PROMPTS[0], 8)
    heard = submitted(loop, PROMPTS[0], 8, eos_token_id=expected[4])
    assert heard.reason == "stop"
    assert heard.ids == expected[: expected.index(expected[4]) + 1]


def test_without_stop_tokens_a_generation_is_as_long_as_it_may_be(model: Model, loop: GenerationLoop) -> None:
    expected = model.alone(PROMPTS[0], 8)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = expected[4], None
    heard = submitted(loop, PROMPTS[0], 8, eos_token_id=[])
    assert (heard.reason, heard.ids) == ("length", expected)


@pytest.mark.parametrize("num_new", [0, 3])
def test_a_prompt_is_scored_by_the_models_own_logits(model: Model, loop: GenerationLoop, num_new: int) -> None:
    prompt = tuple(torch.randint(VOCAB, (150,)).tolist())
    other = submitted(loop, PROMPTS[0], 8)
    heard, config = Heard(), GenerationConfig(do_sample=False)
    config.max_new_tokens = num_new
    loop.submit(Request(prompt, config, num_logprobs=2, scores_prompt=True), heard)  # type: ignore[arg-type]
    assert (heard.reason, heard.ids) == ("length", model.alone(prompt, num_new))
    assert (other.reason, other.ids) == ("length", model.alone(PROMPTS[0], 8))
    with torch.no_grad():
        hidden = blocks(model.get_input_embeddings()(torch.tensor([prompt])))
        logprobs = model.lm_head(hidden)[0].log_softmax(-1)[:-1]  # [149, vocabulary]
    assert tuple(token.id for token in heard.prompt) == prompt and heard.prompt[0] == Token(prompt[0])
    found = torch.tensor([token.logprob for token in heard.prompt[1:]])
    assert torch.allclose(found, logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], atol=1e-5)
    assert [[rank[0] for rank in token.top] for token in heard.prompt[1:]] == logprobs.topk(2).indices.tolist()
    assert all(session.closed.wait(TIMEOUT_S) for session in model.sessions)


@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_session_that_fails_ends_its_own_generation_alone(model: Model, loop: GenerationLoop, left: int) -> None:
    model.left = [None, left]
    good, bad = submitted(loop, PROMPTS[0], 8), submitted(loop, PROMPTS[1], 8)
    assert isinstance(bad.reason, PeerUnavailable)
    assert bad.ids == model.alone(PROMPTS[1], left)
    assert (good.reason, good.ids) == ("length", model.alone(PROMPTS[0], 8))
    assert all(session.closed.wait(TIMEOUT_S) for session in model.sessions)


def test_a_generation_is_computed_in_the_context_of_its_request(model: Model, loop: GenerationLoop) -> None:
    heard = []
    for name, prompt in (("first", PROMPTS[0]), ("second", PROMPTS[1])):
        token = REQUEST.set(name)
        heard.append(submitted(loop, prompt, 5))
        REQUEST.reset(token)
    assert [each.reason for each in heard] == ["length"] * 2
    assert [session.requests for session in model.sessions] == [{"first"}, {"second"}]
