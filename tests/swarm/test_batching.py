"""Generations that go through one loop are those of ``generate``, however they join, leave and fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, PreTrainedModel

from swarm_client import RequestRejected
from swarm_client.batching.loop import GenerationLoop
from swarm_client.batching.request import FinishReason, Item, Request, Scored, Servers, Token
from swarm_client.batching.rows import BatchedModel
from swarm_client.core.events import Event, Recovery
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import connected, ends_only_at_its_length, hosted, random_ids
from tests.swarm.tuning import lora, tuned
from tests.swarm.waiting import DEADLINE_S, wait_for
from tests.zoo import POSITIONS, SUPPORTED, save_checkpoint

SPANS = ("0:2", "2:6")

# In how positions and masks of rows reach their blocks, or in what those keep of each row.
DIFFERENT = ("gpt2", "bloom", "gemma3_text", "llama4_text", "qwen3_next")


@dataclass
class Heard:
    """A listener that keeps what it hears. ``at``: after so many tokens, ``then`` is called, once."""

    tokens: list[Token] = field(default_factory=list)
    reason: FinishReason | BaseException | None = None
    at: int = 0
    then: Any = None
    happenings: list[tuple[int, Servers | Event]] = field(default_factory=list)  # each after so many tokens
    prompt: list[Token] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __call__(self, item: Item | BaseException) -> None:
        if isinstance(item, Token):
            self.tokens.append(item)
            if len(self.tokens) == self.at:
                self.then()
        elif isinstance(item, Scored):
            self.prompt = list(item.prompt)
        elif isinstance(item, str | BaseException):
            self.reason = item
            self._over.set()
        else:
            self.happenings.append((len(self.tokens), item))

    @property
    def ids(self) -> list[int]:
        """Once it has ended."""
        assert self._over.wait(DEADLINE_S)
        if isinstance(self.reason, BaseException):
            raise self.reason
        return [token.id for token in self.tokens]


def request(number: int, **options: Any) -> Request:
    """With a prompt whose length and tokens depend on the number; every second one samples."""
    sampled = {"do_sample": True, "temperature": 0.8 + number / 50, "top_k": 20, "top_p": 0.9} if number % 2 else {}
    config = {"max_new_tokens": 6 + 3 * (number % 4), **sampled, **options}
    return Request(prompt_of(number), GenerationConfig(**config), seed=number)


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple(random_ids(1, 3 + 5 * number % 17, seed=number)[0].tolist())


def alone(model: PreTrainedModel, asked: Request, **options: Any) -> list[int]:
    """What ``generate`` writes for this request."""
    torch.manual_seed(asked.seed or 0)
    ids = torch.tensor([asked.prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=asked.config, **options)
    return output[0, ids.shape[1] :].tolist()


@pytest.fixture
def loop(pair) -> Iterator[GenerationLoop]:
    with GenerationLoop(pair.remote) as loop:
        yield loop


@pytest.mark.promise("many sessions are computed together, and each writes what it writes alone")
def test_many_at_once_write_what_each_writes_alone(pair, loop, monkeypatch):
    num_rows: list[int] = []
    logits = BatchedModel.logits
    monkeypatch.setattr(
        BatchedModel, "logits", lambda self, ids, *rest: num_rows.append(len(ids)) or logits(self, ids, *rest)
    )
    asked = [request(number) for number in range(12)]
    heard = [Heard(at=1), *(Heard() for _ in asked[1:])]

    def submit_others() -> None:
        for one, listener in zip(asked[1:], heard[1:], strict=True):
            loop.submit(one, listener)
        heard[0].at, heard[0].then = 2, wait_for_others

    def wait_for_others() -> None:
        """The loop, whose thread this is, has the first outputs of all others before it, or has just taken them."""
        wait_for(lambda: all(row.session.length for row in loop._rows), "the prompts of all others are computed")
        assert len(loop._rows) == len(asked)

    heard[0].then = submit_others
    loop.submit(asked[0], heard[0])
    assert [listener.ids for listener in heard] == [alone(pair.whole, one) for one in asked]
    assert {listener.reason for listener in heard} == {"length"}
    assert sum(num_rows) == sum(one.config.max_new_tokens for one in asked)
    assert max(num_rows) >= len(asked) // 2  # they were computed together: in two groups, since there are two servers
    pair.servers.wait_until_all_room_is_free()


def test_logprobs_are_those_of_the_models_own_logits(pair, loop):
    asked = request(1)
    loop.submit(Request(asked.prompt, asked.config, asked.seed, num_logprobs=3), heard := Heard())
    ids = torch.tensor([[*asked.prompt, *heard.ids]])
    with torch.no_grad():
        logprobs = pair.whole(ids).logits[0, len(asked.prompt) - 1 : -1].log_softmax(-1)
    for token, expected in zip(heard.tokens, logprobs, strict=True):
        top = expected.topk(3)
        assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-4)
        assert [token_id for token_id, _ in token.top] == top.indices.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(top.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("at", [1, 5])
def test_who_is_cancelled_frees_its_room_and_the_others_go_on(pair, loop, at):
    gone, stays = request(0, max_new_tokens=60), request(2, max_new_tokens=20)
    submitted, cancelled = threading.Event(), threading.Event()
    generation: list[Any] = []
    heard = Heard(at=at)
    loop.submit(stays, other := Heard())
    heard.then = lambda: (submitted.wait(DEADLINE_S), generation[0].cancel(), cancelled.set())
    generation.append(loop.submit(gone, heard))
    submitted.set()
    assert other.ids == alone(pair.whole, stays)
    assert cancelled.wait(DEADLINE_S)
    pair.servers.wait_until_all_room_is_free()
    assert heard.reason is None and len(heard.tokens) < 60


class _Broken(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ValueError("the grammar has no rule")


def test_what_a_processor_raises_ends_its_own_generation(pair, loop):
    good, bad = request(0), request(1)
    loop.submit(Request(bad.prompt, bad.config, processors=(_Broken(),)), broken := Heard())
    loop.submit(good, heard := Heard())
    assert heard.ids == alone(pair.whole, good)
    with pytest.raises(ValueError, match="the grammar has no rule"):
        assert broken.ids
    pair.servers.wait_until_all_room_is_free()


def test_who_asks_hears_which_servers_compute_and_what_happens_to_them(fleet, client):
    asked, other = (request(number, max_new_tokens=24) for number in (0, 1))
    heard, not_asking = Heard(at=5), Heard()
    killed: list[str] = []

    def kill() -> None:
        killed.append(heard.happenings[0][1].hops[1].server.peer_id)
        fleet.find(killed[0]).kill()

    heard.then = kill
    with GenerationLoop(client.model) as loop:
        loop.submit(replace(asked, with_servers=True), heard)
        loop.submit(other, not_asking)
        assert [heard.ids, not_asking.ids] == [alone(fleet.whole, one) for one in (asked, other)]
    (at_first, before), (at, event), (later, after) = heard.happenings
    assert at_first == 0 and at == later >= 5
    assert [str(hop.span) for hop in before.hops] == [str(hop.span) for hop in after.hops] == ["0:2", "2:4", "4:6"]
    assert isinstance(event, Recovery) and event.failed == (killed[0],)
    assert event.replacements == (after.hops[1].server.peer_id,) != event.failed
    assert not_asking.happenings == []


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ((), {}, "the prompt is empty"),
        ((3,), {"max_new_tokens": None}, "max_new_tokens is"),
        ((3,), {"max_new_tokens": POSITIONS}, f"need {POSITIONS + 1} positions, but the model has {POSITIONS}"),
        ((3,), {"num_beams": 2}, "beams and assistants are not batched"),
        ((3,), {"num_return_sequences": 2, "do_sample": True}, "one request for each"),
        ((3,), {"stop_strings": "x"}, "stop_strings is not batched"),
        ((3,), {"max_time": 1.0}, "max_time is not batched"),
        ((3, 10**6), {}, "token ids must be from 0"),
        ((-1,), {}, "token ids must be from 0"),
    ],
)
def test_what_is_no_request_is_refused(loop, prompt, options, message):
    with pytest.raises(RequestRejected, match=message):
        loop.submit(Request(prompt, GenerationConfig(**{"max_new_tokens": 4, **options})), Heard())


def test_an_adapter_in_the_blocks_takes_part(tmp_path):
    asked = [request(number) for number in range(4)]
    heard = [Heard() for _ in asked]
    with (
        hosted(tmp_path, "0:6") as servers,
        tuned(servers, lora(init_lora_weights=False)) as both,
        GenerationLoop(both.remote) as loop,
    ):
        for one, listener in zip(asked, heard, strict=True):
            loop.submit(one, listener)
        assert [listener.ids for listener in heard] == [alone(both.local, one) for one in asked]


def test_closing_ends_all(pair):
    loop = GenerationLoop(pair.remote)
    loop.submit(request(0, max_new_tokens=100), heard := Heard())
    loop.close()
    with pytest.raises(RequestRejected, match="closed"):
        assert heard.ids
    with pytest.raises(RequestRejected, match="closed"):
        loop.submit(request(0), Heard())
    pair.servers.wait_until_all_room_is_free()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in DIFFERENT else pytest.mark.long) for name in SUPPORTED]
)
def test_every_family_can_be_batched_and_scores_prompts(family, tmp_path):
    save_checkpoint(family, tmp_path)
    whole = ends_only_at_its_length(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    prompt = random_ids(1, 70, seed=9)  # longer than what is scored at once
    with torch.no_grad():
        logprobs = whole(prompt).logits[:, :-1].log_softmax(-1).gather(2, prompt[:, 1:, None]).flatten().tolist()
    asked = [request(number) for number in range(5)]
    heard = [Heard() for _ in asked]
    with InProcessServers(tmp_path, cache_tokens=16384, memory_dht=True) as servers:
        servers.start("0:2", "2:6")
        with connected(servers) as remote, GenerationLoop(remote) as loop:
            for one, listener in zip(asked, heard, strict=True):
                loop.submit(one, listener)
            scoring = replace(request(0), prompt=tuple(prompt[0].tolist()), num_logprobs=0, scores_prompt=True)
            loop.submit(scoring, scored := Heard())
            assert [listener.ids for listener in heard] == [alone(whole, one) for one in asked]
            assert scored.ids == alone(whole, scoring)
            assert [token.id for token in scored.prompt] == prompt[0].tolist()
            # Rounding alone parts a pass of qwen3_5_moe_text from its single steps by 1e-4.
            assert [token.logprob for token in scored.prompt[1:]] == pytest.approx(logprobs, abs=5e-4)
