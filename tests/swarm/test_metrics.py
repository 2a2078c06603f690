"""What ``--metrics-port`` shows of a real server is what a client knows that it has asked of it."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator

import pytest
import torch
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from swarm_cli.demo.local_cluster import LocalServer
from swarm_client import ClientConfig, DistributedModel, SwarmError
from tests.swarm.waiting import wait_for
from tests.zoo import BLOCKS, VOCAB, save_checkpoint

ROOM = 400  # positions
PROMPT, NEW = 7, 12  # positions, tokens
SHARED = 130  # positions: of a prompt with two full pages that the prefix cache keeps


class Scraped:
    """One reading of the metrics."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(url) as answer:
            text = answer.read().decode()
        self._families: dict[str, Metric] = {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, sample_name: str, **labels: str) -> float:
        """0 of what has not been counted yet."""
        return sum(
            sample.value
            for family in self._families.values()
            for sample in family.samples
            if sample.name == f"swarm_server_{sample_name}" and sample.labels.items() >= labels.items()
        )


def scrape(log: str) -> Scraped:
    """Of the server that has written this."""
    found = re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", log)
    assert found
    return Scraped(found[1])


class Metered:
    """A server with all blocks, and a model that it computes."""

    def __init__(self, server: LocalServer, model: DistributedModel) -> None:
        self.model, self._server = model, server

    def scrape(self) -> Scraped:
        return scrape(self._server.stderr.read_text())

    def generate(self, num_prompt: int, num_new: int, seed: int, num_rows: int = 1) -> None:
        ids = torch.randint(3, VOCAB, (num_rows, num_prompt), generator=torch.Generator().manual_seed(seed))
        output = self.model.generate(ids, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False)
        assert output.shape == (num_rows, num_prompt + num_new)


@pytest.fixture(scope="module")
def metered(cluster, tmp_path_factory) -> Iterator[Metered]:
    place = tmp_path_factory.mktemp("metered")
    save_checkpoint("llama", place / "llama")
    arguments = ["--model", str(place / "llama"), "--quant", "none", "--throughput", "100", "--cache-tokens", str(ROOM)]
    swarm = ("--swarm", "metered-alone")
    server = cluster.start(*arguments, *swarm, "--prefix-cache", "all", "--metrics-port", "0")
    try:
        cluster.wait_ready([server])
        config = ClientConfig(
            initial_peers=(server.ready["peer"],), swarm=swarm[1], check_share=0.0, wait_timeout_s=0.5, draft="none"
        )
        with DistributedModel.from_pretrained(place / "llama", config=config) as model:
            yield Metered(server, model)
    finally:
        server.kill()


def grown(metered: Metered, before: Scraped, name: str, **labels: str) -> float:
    return metered.scrape().value(name, **labels) - before.value(name, **labels)


@pytest.mark.promise("a server exports what it counts as metrics")
def test_positions_are_those_that_were_generated(metered):
    before = metered.scrape()
    metered.generate(PROMPT, NEW, seed=1, num_rows=3)
    assert grown(metered, before, "positions_total", kind="prefill") == 3 * PROMPT
    assert grown(metered, before, "positions_total", kind="decode") == 3 * (NEW - 1)  # the prompt gives the first token
    assert grown(metered, before, "batch_rows_sum") == 3 * NEW
    assert grown(metered, before, "batch_rows_count") == NEW
    assert grown(metered, before, "sessions_opened_total", kind="new") == 1
    assert grown(metered, before, "sessions_opened_total", kind="replacement") == 0
    assert grown(metered, before, "calls_total", method="Session") == 1
    assert grown(metered, before, "queue_wait_seconds_count") >= NEW
    assert grown(metered, before, "compute_seconds_total") > 0
    hidden_bytes = 4 * metered.model.config.hidden_size
    assert grown(metered, before, "received_bytes_total") > 3 * (PROMPT + NEW - 1) * hidden_bytes
    assert grown(metered, before, "sent_bytes_total", kind="reply") > 3 * NEW * hidden_bytes


def test_what_the_prefix_cache_has_is_not_computed(metered):
    metered.generate(SHARED, 1, seed=2)
    before = metered.scrape()
    metered.generate(SHARED, 1, seed=2)
    reused = grown(metered, before, "positions_total", kind="reused")
    assert reused >= 64
    assert grown(metered, before, "positions_total", kind="prefill") == SHARED - reused


def test_passes_of_training(metered):
    before = metered.scrape()
    ids = torch.randint(3, VOCAB, (2, 9))
    embeddings = metered.model.get_input_embeddings()(ids).detach().requires_grad_()
    metered.model(inputs_embeds=embeddings, use_cache=False).logits.sum().backward()
    assert grown(metered, before, "positions_total", kind="forward") == 2 * 9
    assert grown(metered, before, "positions_total", kind="backward") == 2 * 9
    assert grown(metered, before, "calls_total", method="Backward") == 1


def test_room_and_sessions(metered):
    wait_for(lambda: metered.scrape().value("kv_free_tokens") == ROOM, "the room of earlier sessions has come back")
    assert metered.scrape().value("kv_tokens") == ROOM
    with torch.no_grad():
        cache = metered.model(torch.full((1, PROMPT), 5), use_cache=True).past_key_values
    during = metered.scrape()
    assert during.value("sessions") == 1
    assert during.value("kv_free_tokens") <= ROOM - PROMPT
    cache.session.close()
    wait_for(lambda: metered.scrape().value("sessions") == 0, "the session is gone")


def test_refusals_are_counted_by_status(metered):
    before = metered.scrape()
    with pytest.raises(SwarmError, match="KV cache"):
        metered.generate(120, 2, seed=4, num_rows=4)
    assert grown(metered, before, "refusals_total", status="RESOURCE_EXHAUSTED") >= 1
    assert grown(metered, before, "refusals_total") == grown(
        metered, before, "refusals_total", status="RESOURCE_EXHAUSTED"
    )


def test_what_the_server_is(metered):
    scraped = metered.scrape()
    assert scraped.value("info", model="llama", quant="none", device="cpu") == 1
    assert scraped.value("state", state="online") == 1 and scraped.value("state") == 1
    assert scraped.value("model_blocks", model="llama") == BLOCKS
    assert [scraped.value("block_hosted", block=str(block)) for block in range(BLOCKS + 1)] == [1] * BLOCKS + [0]
    assert scraped.value("announced_tokens_per_second", kind="decode") == 100
