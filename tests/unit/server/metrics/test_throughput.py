"""Speeds: measured on a real engine, cached for the next start, followed while the server works."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch

from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import SessionStep
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.machine.cores import CoreShare
from swarm_server.metrics import throughput
from swarm_server.metrics.throughput import Meter, SpeedCache, Speeds, measure


class Changes(list):
    """What a meter reports."""

    def __call__(self, speeds: Speeds) -> None:
        self.append(speeds)


@pytest.fixture(scope="module")
def engine(stack_of) -> Engine:
    return Engine(stack_of("llama"))


@pytest.mark.parametrize("span", [Span(0, 4), Span(1, 2)], ids=str)
def test_a_measurement_is_of_the_span(engine, monkeypatch, span) -> None:
    """On a clock that counts the blocks that are computed, a tenth of a second each."""
    clock_s, run = [0.0], engine.run

    def timed(batch):
        clock_s[0] += sum(len(session.blocks) for session, _ in batch) / 10
        return run(batch)

    monkeypatch.setattr(engine, "run", timed)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: clock_s[0]))
    speeds = measure(engine, span)
    assert speeds.decode_tokens_per_s == pytest.approx(10 / len(span))
    assert speeds.forward_tokens_per_s == pytest.approx(64 * 10 / len(span))


def cache(tmp_path, *setting: str) -> SpeedCache:
    return SpeedCache(setting or ("model", "int8"), CoreShare(tmp_path / "cores", {0}, {}), tmp_path / "speeds")


def test_what_was_measured_is_known_at_the_next_start(tmp_path) -> None:
    assert cache(tmp_path).read() is None
    cache(tmp_path).write(Speeds(40.0, 1200.0))
    assert cache(tmp_path).read() == Speeds(40.0, 1200.0)
    assert cache(tmp_path, "model", "nf4").read() is None


def test_another_share_of_the_machine_is_another_matter(tmp_path) -> None:
    share = CoreShare(tmp_path / "cores", {0, 1}, {"OMP_NUM_THREADS": "2"})
    SpeedCache(["model", "int8"], share, tmp_path / "speeds").write(Speeds(40.0, 1200.0))
    assert cache(tmp_path).read() is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"decode_tokens_per_s": 1}',
        '{"decode_tokens_per_s": 0, "forward_tokens_per_s": 1}',
        '{"decode_tokens_per_s": NaN, "forward_tokens_per_s": 1}',
        '{"decode_tokens_per_s": "x", "forward_tokens_per_s": 1}',
    ],
)
def test_a_damaged_entry_is_measured_again(tmp_path, content: str) -> None:
    cache(tmp_path).write(Speeds(40.0, 1200.0))
    (path,) = (tmp_path / "speeds").glob("*.json")
    assert json.loads(path.read_text())["forward_tokens_per_s"] == 1200.0
    path.write_text(content)
    assert cache(tmp_path).read() is None


def test_an_old_entry_is_measured_again(tmp_path) -> None:
    cache(tmp_path).write(Speeds(40.0, 1200.0))
    (path,) = (tmp_path / "speeds").glob("*.json")
    os.utime(path, (0, 0))
    assert cache(tmp_path).read() is None


def test_where_nothing_can_be_cached_nothing_is_lost(tmp_path) -> None:
    (tmp_path / "speeds").write_text("in the way")
    cache(tmp_path).write(Speeds(40.0, 1200.0))
    assert cache(tmp_path).read() is None


def fed(meter: Meter, times: int, **batch: float) -> Meter:
    for _ in range(times):
        meter.add(**batch)
    return meter


def test_real_traffic_replaces_what_was_measured() -> None:
    """Four blocks, measured at 100 tokens/s, take 20 ms a step, and prompts pass at 1000 tokens/s."""
    changes = Changes()
    meter = Meter(Speeds(100.0, 3000.0), 4, changes)
    assert meter.speeds == Speeds(100.0, 3000.0)
    fed(meter, 1000, num_blocks=4, num_rows=1, num_tokens=1, seconds=0.02)
    fed(meter, 1000, num_blocks=4, num_rows=1, num_tokens=64, seconds=0.064)
    assert meter.speeds.decode_tokens_per_s == pytest.approx(50.0, rel=throughput._WORTH_ANNOUNCING)
    assert meter.speeds.forward_tokens_per_s == pytest.approx(1000.0, rel=throughput._WORTH_ANNOUNCING)
    assert changes[-1].through(4) == meter.speeds


def test_half_the_blocks_take_half_the_time() -> None:
    meter = fed(Meter(Speeds(100.0, 3000.0), 4, Changes()), 1000, num_blocks=2, num_rows=1, num_tokens=1, seconds=0.005)
    assert meter.speeds == Speeds(100.0, 3000.0)


def test_rows_of_one_session_do_not_make_a_server_slow_for_others() -> None:
    """64 rows that take as long as 64 positions of a prompt do, beside the 10 ms that a step takes; of 64 sessions
    each would wait for the others."""
    meter = Meter(Speeds(100.0, 6400.0), 4, Changes())
    fed(meter, 1000, num_blocks=4, num_rows=64, num_tokens=1, seconds=0.01 + 63 / 6400)
    assert meter.speeds == Speeds(100.0, 6400.0)
    fed(meter, 1000, num_blocks=4, num_rows=64, num_tokens=1, seconds=0.02, num_sessions=64)
    assert meter.speeds.decode_tokens_per_s == pytest.approx(50.0, rel=throughput._WORTH_ANNOUNCING)


def test_a_few_slow_batches_and_noise_change_nothing() -> None:
    changes = Changes()
    meter = Meter(Speeds(100.0, 3000.0), 4, changes)
    fed(meter, 2, num_blocks=4, num_rows=1, num_tokens=1, seconds=0.05)
    for number in range(1000):
        meter.add(num_blocks=4, num_rows=1, num_tokens=1, seconds=0.01 * (1.1 if number % 2 else 0.9))
    assert meter.speeds == Speeds(100.0, 3000.0) and not changes


def test_short_prompts_say_little_about_long_ones() -> None:
    meter = fed(Meter(Speeds(100.0, 3000.0), 4, Changes()), 1000, num_blocks=4, num_rows=1, num_tokens=3, seconds=0.01)
    assert meter.speeds == Speeds(100.0, 3000.0)


def test_a_speed_that_was_given_stays() -> None:
    meter = fed(Meter(Speeds(7.0, 7.0), 4, None), 1000, num_blocks=4, num_rows=1, num_tokens=1, seconds=0.02)
    assert meter.speeds == Speeds(7.0, 7.0)


def test_the_engine_tells_its_meter_what_it_computed(engine) -> None:
    batches = []

    class Recorder:
        def add(self, num_blocks: int, num_rows: int, num_tokens: int, seconds: float, num_sessions: int) -> None:
            batches.append((num_blocks, num_rows, num_tokens, seconds > 0, num_sessions))

    engine.meter = Recorder()
    try:
        session = engine.open(Span(1, 3), 2, CacheBudget(2**40, 1).lease(""), reserved=8, shares=False)
        for start, num_tokens in ((0, 5), (5, 1)):
            positions = torch.arange(start, start + num_tokens)[None]
            inputs = BlockInput(torch.zeros(2, num_tokens, engine.hidden_size), None, positions)
            engine.run([(session, SessionStep(start, inputs))])
        engine.close(session)
    finally:
        engine.meter = None
    assert batches == [(2, 2, 5, True, 1), (2, 2, 1, True, 1)]
