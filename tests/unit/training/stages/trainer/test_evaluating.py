"""The loss on held-out data of a run in stages is what transformers computes with the weights of all stages."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from swarm_training.core.config import EvaluationPolicy
from tests.worlds.whole_runs import CONFIG, HELD_OUT, MODEL, WholeRun, one_process

EVERY, LIMIT_S = 2, 300.0


def plain_losses(steps: int) -> dict[int, float]:
    """By evaluated step, what stock code computes of all samples at once, with the weights of one process."""
    history, _ = one_process(steps)
    model, ids = LlamaForCausalLM(MODEL).eval(), HELD_OUT.rows(np.arange(len(HELD_OUT)))
    found = {}
    for step in range(EVERY, steps + 1, EVERY):
        model.load_state_dict(history[step], strict=False)
        with torch.no_grad():
            found[step] = float(model(input_ids=ids, labels=ids).loss)
    return found


async def test_losses_are_those_of_stock_code_and_end_the_run_for_trainers_too() -> None:
    """No loss falls by so much as is asked for, so the second evaluation is the last one."""
    policy = EvaluationPolicy(EVERY, patience=1, least_improvement=100.0)
    config = replace(CONFIG, evaluation=policy)
    async with asyncio.timeout(LIMIT_S), WholeRun.running(2, 1, config=config) as run:
        await run.until(lambda: all(peer.moment is not None for peer in run.peers))
        training = asyncio.ensure_future(run.train(None, []))
        await run.until(training.done)
        assert training.result() == 2 * EVERY + 1
        (first,), (last,) = run.of_stage(0), run.of_stage(1)
        expected = plain_losses(2 * EVERY)
        found = {each.step: each.loss for each in last.life.evaluation.known.losses}
        assert found == pytest.approx(expected, rel=1e-5)
        assert last.life.peer.own.held_out is not None and last.life.peer.own.held_out.samples == len(HELD_OUT)
        assert first.life.step == last.life.step == 2 * EVERY + 1
