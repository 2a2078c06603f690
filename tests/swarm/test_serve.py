"""``serve`` as users have it: the command, the ``openai`` package, and servers that are killed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_cli.demo.local_cluster import LocalServer
from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_gateway.monitor.status import read_status
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from tests.adapted import LocalModel
from tests.marks import SLOW
from tests.swarm.processes import run_commands
from tests.swarm.raw_client import RawClient
from tests.swarm.serve_process import ServeProcess
from tests.swarm.waiting import DEADLINE_S, wait_for
from tests.zoo import save_checkpoint

ROOM = 4096  # positions on each server
PROMPT = "Return a list of"
TEMPLATE = (  # with the words by which Qwen's calls are known
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}"
    '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>{% endif %}'
)


@dataclass
class Front:
    """A gateway before a swarm of processes.

    Attributes:
        whole: the model, on this machine; ``second``: another, with the adapter ``poet``.
    """

    url: str
    swarm: str
    servers: list[LocalServer]
    tokenizer: Any
    whole: Any
    second: LocalModel

    def client(self, **options: Any) -> Any:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=DEADLINE_S, **options)

    def complete(self, **options: Any) -> Any:
        return self.client().completions.create(**{"model": "docs", "prompt": PROMPT, "temperature": 0} | options)

    def chat(self, **options: Any) -> Any:
        messages = [{"role": "user", "content": PROMPT}]
        return self.client().chat.completions.create(**{"model": "docs", "messages": messages} | options)

    def expected(self, num_tokens: int, model: Any = None) -> str:
        """Greedy, of a model on this machine."""
        inputs = self.tokenizer(PROMPT, return_tensors="pt")
        output = (model or self.whole).generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        return whole_text(self.tokenizer, output[0], inputs.input_ids.shape[1])

    def room_left(self) -> dict[str, int]:
        """Of each server that answers, by its peer id."""
        found = {}
        for model in background.run(read_status(ClientConfig(swarm=self.swarm))).models:
            for server in model.servers:
                if server.record.peer_id in {own.peer_id for own in self.servers if own.alive}:
                    with RawClient(server.record) as client:
                        found[server.record.peer_id] = client.describe().cache_tokens_left
        return found

    def kill_one_in_use(self) -> bool:
        """Kill a server that holds keys and values of some generation. Return whether there was one."""
        holding = {peer_id for peer_id, left in self.room_left().items() if left < ROOM}
        for server in self.servers:
            if server.alive and server.peer_id in holding:
                server.kill()
                assert server.wait_gone(DEADLINE_S)
                return True
        return False

    def wait_until_all_room_is_free(self) -> None:
        wait_for(lambda: set(self.room_left().values()) == {ROOM}, "all room for keys and values has come back")


def whole_text(tokenizer: Any, ids: Any, start: int) -> str:
    """Behind so many tokens."""
    before = tokenizer.decode(ids[:start], skip_special_tokens=True)
    return tokenizer.decode(ids, skip_special_tokens=True)[len(before) :]


@pytest.fixture(scope="module")
def front(cluster, tmp_path_factory) -> Iterator[Front]:
    directory = tmp_path_factory.mktemp("models")
    shutil.copytree(locate(DEFAULT_MODEL), directory / "docs")
    (directory / "docs" / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(directory / "docs")
    save_checkpoint("llama", directory / "second", vocab_size=len(tokenizer), max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / "docs" / name, directory / "second")
    second = LocalModel.load(directory / "second", r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"])
    second.peft.save_pretrained(directory / "poet")
    swarm = f"serve-{os.getpid()}"
    common = ("--swarm", swarm, "--cache-tokens", str(ROOM), "--quant", "none")
    servers = [
        cluster.start("--model", str(directory / "docs"), "--blocks", blocks, "--throughput", throughput, *common)
        for blocks, throughput in (("0:10", "1000"), ("10:20", "1000"), ("0:20", "10"), ("0:20", "10"))
    ]
    servers.append(
        cluster.start(
            *("--model", str(directory / "second"), "--blocks", "0:6", "--adapters", str(directory / "poet"), *common)
        )
    )
    cluster.wait_ready(servers)
    serving = ServeProcess("--model", "docs", "--swarm", swarm, directory=directory)
    whole = AutoModelForCausalLM.from_pretrained(directory / "docs", dtype=torch.float32)
    try:
        yield Front(serving.url, swarm, servers, tokenizer, whole, second)
        assert serving.end() == 0, serving.log.read_text()  # of Ctrl-C
        assert "Traceback" not in serving.log.read_text()
    finally:
        serving.end(signal.SIGKILL)
        for server in servers:
            server.kill()


@pytest.mark.promise("swarm serve answers as OpenAI's API does")
def test_completions_are_those_of_generate(front: Front) -> None:
    answer = front.complete(max_tokens=12, logprobs=1)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (front.expected(12), "length")
    ids = torch.tensor([[*front.tokenizer(PROMPT).input_ids]])
    with torch.no_grad():
        first = front.whole(ids).logits[0, -1].log_softmax(-1).max().item()
    assert abs(choice.logprobs.token_logprobs[0] - first) < 1e-2
    assert "".join(chunk.choices[0].text for chunk in front.complete(max_tokens=12, stream=True)) == choice.text


@SLOW
def test_other_models_and_their_adapters(front: Front) -> None:
    assert [model.id for model in front.client().models.list()] == ["docs", "second", "second:poet"]
    adapted = front.expected(8, front.second.peft)
    with front.second.peft.disable_adapter():
        plain = front.expected(8, front.second.peft)
    assert plain != adapted
    for name, expected in (("second", plain), ("second:poet", adapted)):
        assert front.complete(model=name, max_tokens=8).choices[0].text == expected


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=SLOW)])
def test_who_leaves_frees_the_room_on_servers(front: Front, stream: bool) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=front.url, api_key="none", timeout=DEADLINE_S) as client:
            asking = asyncio.create_task(
                client.completions.create(model="docs", prompt=PROMPT, max_tokens=900, n=4, stream=stream)
            )
            taken = "the generations have room on servers"
            await asyncio.to_thread(wait_for, lambda: min(front.room_left().values(), default=ROOM) < ROOM, taken)
            if stream:
                await (await asking).close()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    front.wait_until_all_room_is_free()


def test_a_server_is_killed_in_the_middle_of_a_stream(front: Front) -> None:
    """The last test: fewer servers are left."""
    expected = front.expected(600)
    is_killed = False
    while not is_killed:  # a generation may be over before a server that holds it is found
        text, num_chunks = "", 0
        for chunk in front.complete(max_tokens=600, stream=True):
            text += chunk.choices[0].text
            num_chunks += 1
            if num_chunks == 5:
                is_killed = front.kill_one_in_use()
        assert text == expected and num_chunks > 20


@SLOW
def test_a_model_that_cannot_be_loaded_is_said_at_the_start(tmp_path: Path) -> None:
    shutil.copytree(locate(DEFAULT_MODEL), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    shutil.copytree(locate(DEFAULT_MODEL), tmp_path / "weightless")
    (tmp_path / "weightless" / "model.safetensors").unlink()
    models = {"model": "no tokenizer can be read", "weightless": "has no safetensors weights", "nothing": "nothing"}
    commands = [["serve", "--port", "0", "--model", str(tmp_path / model)] for model in models]
    for outcome, pattern in zip(run_commands("swarm_client", commands, tmp_path), models.values(), strict=True):
        outcome.assert_one_sentence(re.escape(pattern), outcome.code)
        assert outcome.code != 0
