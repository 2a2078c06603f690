"""Joining: the same losses as plain torch, rates by the global step, checkpoints when due, and a clean end."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.errors import CheckpointError
from swarm_protocol.wire.constants import MIB
from swarm_training import core_backend
from swarm_training.checkpoints.store import CheckpointDirectory
from swarm_training.commands import building, joining
from swarm_training.commands.batch_size import BatchSizeLimits, Trial
from swarm_training.commands.building import build_model, build_optimizer, build_tokenizer
from swarm_training.compression.settings import AveragingSettings
from swarm_training.contract.backend import Joining, PeerAddress
from swarm_training.core.config import RollbackPolicy
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.core_backend import open_run
from swarm_training.data.opening import DataReader
from swarm_training.data.order import EVERYTHING
from swarm_training.optim.lamb import LAMB
from swarm_training.optim.local_steps import LocalSteps
from swarm_training.optim.offload import AdamW8bit, LAMB8bit
from swarm_training.reports.stepping import StepReports
from swarm_training.run.state import TrainedState
from swarm_training.runfile.memory import listed, mib, total, volunteer_parts
from swarm_training.runfile.settings import (
    OPTIMIZERS,
    BatchSettings,
    ClipSettings,
    LocalSettings,
    ModelSettings,
    OptimizerSettings,
    RunFile,
)
from tests.unit.training.commands.one_peer import BATCH, BLOCK, IDENTITY, STEPS, TARGET, joined, prepared, who
from tests.unit.training.fakes import LocalRun
from tests.unit.training.reports.test_reporters import Kept

OTHERS = ("/ip4/127.0.0.1/tcp/1/p2p/QmOther",)


def rejoined(
    file: RunFile, said: list[str], step: int, rollbacks: int, peers: tuple[str, ...] = (), is_stopping: bool = False
) -> tuple[Joining, joining.TrainingSetup]:
    """A run that is at this step, and went back to it, is joined: with what, and what was prepared."""
    given: list[Joining] = []
    stopping = threading.Event()

    def open_run(who: Joining, *arguments: Any) -> LocalRun:
        given.append(who)
        run = LocalRun(*arguments, TARGET)
        run.num_steps, run.num_rollbacks, run.went_back_to = step, rollbacks, step
        if is_stopping:
            stopping.set()
        return run

    setup = prepared(file, said)
    joining.take_part(setup, replace(who(), initial_peers=peers), open_run, stopping, said.append)
    return given[0], setup


def test_it_trains_as_plain_torch_does_until_the_schedules_end(file: RunFile, tmp_path: Path) -> None:
    said: list[str] = []
    run = joined(file, said)
    assert run.is_closed and run.num_steps == STEPS and run.shares == [BATCH] * (2 * STEPS)
    assert run.rates == [file.optimizer.rate(step) for step in range(STEPS)]

    tokenizer = build_tokenizer(file.model)
    model = build_model(file.model, len(tokenizer), BLOCK)
    batches = building.build_batches(
        file.data, DataReader("run", IDENTITY.peer_id, EVERYTHING), tokenizer, BATCH, tmp_path / "other cache"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    expected = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = file.optimizer.rate(step)
        for _ in range(2):
            tokens = batches.next_batch()
            logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    losses = [float(line.split("loss ")[1]) for line in said if "loss" in line]
    assert losses == pytest.approx(expected, abs=2e-3)
    saved = CheckpointDirectory(tmp_path / "checkpoints").read(STEPS)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / f"step-{STEPS:09d}")
    assert all(torch.equal(each, saved.parameters[name]) for name, each in served.state_dict().items())
    assert AutoTokenizer.from_pretrained(served.name_or_path).get_vocab() == tokenizer.get_vocab()
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(saved.parameters[name], parameter, atol=1e-5, rtol=1e-4)


def test_tokens_of_another_run_are_not_taken_since_its_files_come_in_another_order(
    file: RunFile, tmp_path: Path
) -> None:
    texts = tmp_path / "several"
    texts.mkdir()
    for number in range(9):
        (texts / f"{number}.txt").write_text(f"{number} " * 40)
    data, tokenizer = replace(file.data, source=str(texts)), build_tokenizer(file.model)

    def blocks(run: str, cache: str) -> list[list[int]]:
        found = building.build_blocks(data, run, tokenizer, tmp_path / cache)
        return found.rows(np.arange(len(found))).tolist()

    blocks("one", "shared")
    assert blocks("other", "shared") == blocks("other", "own") != blocks("one", "shared")


def test_when_the_run_goes_back_later_checkpoints_are_removed_and_the_data_go_on(file: RunFile, tmp_path: Path) -> None:
    file = replace(file, run=replace(file.run, keep=9))
    run = joined(file, said := [], goes_back=(5, 3))
    assert "the run has gone back to step 3" in said
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    assert checkpoints.steps() == [2, 4, 6]
    assert [step for step, _ in checkpoints.losses().series["training"]] == [1, 2, 3, 4, 5, 6]
    assert checkpoints.read(2).data["taken"] == BATCH * 4
    assert checkpoints.read(4).data["taken"] == BATCH * 12  # 5 steps, then one more: two shares each
    assert run.rates == [file.optimizer.rate(step) for step in (0, 1, 2, 3, 4, 3, 4, 5)]


def test_checkpoints_are_written_when_they_are_due(file: RunFile, tmp_path: Path) -> None:
    run = joined(file, said := [])
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    assert checkpoints.steps() == [STEPS - 2, STEPS]
    found = checkpoints.read(STEPS)
    assert found.data == {"taken": BATCH * len(run.shares), "part": 0, "parts": 1}
    assert found.config["optimizer"]["lr"] == 1e-2 and found.optimizer["state"][0]["step"] == STEPS
    assert said[0] == f"{BATCH} samples at once on cpu"
    assert said[1].startswith("memory up to ") and said[2] == f"others join by: --initial-peers {run.initial_peers[0]}"
    assert said[-1] == f"left the run after step {STEPS}"
    lines = [json.loads(line) for line in (checkpoints.path(STEPS) / "losses.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)) and lines[-1]["training"] == run.last_loss
    assert found.losses is not None and found.losses.json_lines() == checkpoints.losses().json_lines()
    assert (checkpoints.path(STEPS) / "loss.svg").read_text().startswith("<svg")


def test_the_hub_gets_each_checkpoint_that_is_due_and_a_hub_that_fails_ends_no_run(
    file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[tuple[str, str, str]] = []

    def upload(directory: Path, repository: str, message: str) -> None:
        commits.append((directory.name, repository, message))
        if len(commits) == 1:
            raise ConnectionError("no route to host")

    monkeypatch.setattr("swarm_training.checkpoints.store.upload_to_hub", upload)
    run = joined(replace(file, run=replace(file.run, hub="ada/run")), said := [])
    due = range(2, STEPS + 1, 2)
    assert commits == [(f"step-{step:09d}", "ada/run", f"run: step {step}") for step in due]
    assert "warning: the checkpoint of step 2 was not copied to ada/run on the hub: no route to host" in said
    assert run.num_steps == STEPS


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(file: RunFile, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    run = joined(file, said := [])
    assert run.num_steps == STEPS
    assert sum(line.startswith("warning: cannot write the checkpoint") for line in said) == STEPS // 2


def test_stopping_and_failing_leave_the_run(file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    run = joined(file, said := [], stop_after=2)
    assert run.is_closed and run.num_steps == 2 and said[-1] == "left the run after step 2"

    def interrupted(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalRun, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        joined(file, said := [])
    assert said[-1] == "left the run after step 0"
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_the_batch_size_is_found_if_the_file_does_not_say_it(file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BatchSizeLimits] = []

    def found(_compute: object, limits: BatchSizeLimits) -> int:
        asked.append(limits)
        return 2

    auto = RunFile(file.run, file.model, file.data, file.optimizer, batch=BatchSettings())
    monkeypatch.setattr(joining, "find_batch_size", found)
    run = joined(auto, said := [])
    assert asked[0].max_size == TARGET and set(run.shares) == {2} and said[0] == "2 samples at once on cpu"


def test_all_peers_begin_with_the_same_weights(file: RunFile) -> None:
    one, other = (build_model(file.model, 100, BLOCK).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    third = build_model(ModelSettings(preset="tiny", tokenizer="x", seed=1), 100, BLOCK).state_dict()
    assert not all(torch.equal(one[name], third[name]) for name in one)


def test_models_come_from_directories_with_and_without_their_weights() -> None:
    pretrained = build_model(ModelSettings(DEFAULT_MODEL, init="pretrained"), 0, BLOCK)
    random = build_model(ModelSettings(DEFAULT_MODEL), 0, BLOCK)
    tokens = torch.tensor([build_tokenizer(ModelSettings(DEFAULT_MODEL))("Return a list of the names").input_ids])
    assert joining.loss_of(pretrained, tokens) + 1 < joining.loss_of(random, tokens)
    assert pretrained.training and all(parameter.dtype == torch.float32 for parameter in random.parameters())
    for settings, reason in (
        (ModelSettings("/nowhere"), "/nowhere does not exist"),
        (ModelSettings("nobody/nothing"), "nobody/nothing is no causal language model"),
    ):
        with pytest.raises(ValueError, match=reason):
            build_model(settings, 0, BLOCK)
    with pytest.raises(ValueError, match="nobody/nothing has no tokenizer that can be read"):
        build_tokenizer(ModelSettings("nobody/nothing"))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "muon"])  # which has more groups
def test_matrices_alone_decay_if_the_file_says_so(name: str) -> None:
    """Beside the same optimizer with the groups that anybody would write in torch, over two steps."""
    models = [torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 1, bias=False))]
    models.append(copy.deepcopy(models[0]))
    settings = OptimizerSettings(name, 0.125, weight_decay=0.25, decay_vectors=False)
    (first, norm, last), built = models[1], build_optimizer(settings, models[0])
    expected = type(built)(
        [
            {"params": [first.weight, last.weight], "weight_decay": 0.25},
            {"params": [first.bias, norm.weight, norm.bias], "weight_decay": 0.0},
        ],
        lr=0.125,
    )
    for step in range(2):
        for model, optimizer in zip(models, (built, expected), strict=True):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + step)
            optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))
    only_matrices = torch.nn.Linear(2, 2, bias=False)
    assert len(build_optimizer(settings, only_matrices).param_groups) == 1


def test_a_run_is_opened_with_the_settings_of_its_file(file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, Any] = {}
    monkeypatch.setattr(core_backend, "TrainingRun", lambda *_arguments, **options: opened.update(options))
    model = torch.nn.Linear(2, 2)
    where = PeerAddress("192.0.2.1", 1, 2, "192.0.2.2")
    who = Joining("run", TARGET, (), IDENTITY, address=where, client_mode=True)
    open_run(who, list(model.parameters()), torch.optim.SGD(model.parameters()))
    config = opened["config"]
    assert PeerAddress(config.host, config.port, config.dht_port, config.announce_host) == where and config.client_mode
    file = replace(file, clip=ClipSettings(0.5), optimizer=replace(file.optimizer, average_decay=0.75))
    file = replace(file, run=replace(file.run, restart_wait_s=5.0), rollback=RollbackPolicy(patience=5))
    for own, has_local_steps, expected in ((0.0, False, 5.0), (0.0, True, 600.0), (7.0, False, 7.0), (7.0, True, 7.0)):
        optimizer = torch.optim.SGD(model.parameters())
        local = LocalSteps(optimizer) if has_local_steps else None
        averaging = AveragingSettings(straggler_s=own, delay=has_local_steps)
        config = replace(file, averaging=averaging, local=LocalSettings(int(has_local_steps))).peer_config
        who = Joining("run", TARGET, (), IDENTITY, config=config, local=local)
        open_run(who, list(model.parameters()), optimizer)
        config = opened["config"]
        assert (config.max_norm, config.average_decay, config.restart_wait_s) == (0.5, 0.75, 5.0)
        assert config.straggler_s == expected and config.delay == has_local_steps
        assert (config.checkpoint_every, config.checkpoints_kept, config.rollback.patience) == (2, 4, 5)
        assert config.checkpoint_directory is not None


def test_peers_with_other_rules_are_no_equals() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    digests = {TrainedState([parameter], kind([parameter])).model_digest for kind in (LAMB, LAMB8bit, AdamW8bit)}
    assert len(digests) == 3


def test_several_rollbacks_at_once_put_checkpoints_aside_and_remove_none(file: RunFile, tmp_path: Path) -> None:
    joined(file, [], stop_after=4)
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    written = directory.steps()
    joining.Writing(prepared(file, said := []), said.append).went_back(None)
    assert written and not directory.steps()
    assert len(list(directory.directory.glob("unused-*"))) == len(written)
    assert any("may have undone any checkpoint here" in line for line in said)


def test_a_run_that_is_founded_again_goes_on_from_its_last_checkpoint(file: RunFile, tmp_path: Path) -> None:
    joined(file, [], stop_after=4)
    given, setup = rejoined(file, said := [], 4, 1)
    assert given.resumed_at == Moment(0, 4)
    assert given.config.ledger == str(tmp_path / "checkpoints" / "run.ledger")
    assert "goes on from the checkpoint of step 4" in said
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    assert setup.optimizer.state[next(setup.model.parameters())]["step"] == STEPS  # 4 of them in the checkpoint
    assert checkpoints.steps() == [4, STEPS] and checkpoints.read(STEPS).rollbacks == 1
    assert [step for step, _ in checkpoints.losses().series["training"]] == list(range(1, STEPS + 1))


class DriftingRun(LocalRun):
    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """What all share is 0."""
        drifted = [parameter.detach().clone() for parameter in self._parameters]
        with torch.no_grad():
            torch._foreach_zero_(self._parameters)
            yield
            torch._foreach_copy_(self._parameters, drifted)


def test_local_steps_have_the_rate_of_their_average_and_checkpoints_have_what_all_share(
    file: RunFile, tmp_path: Path
) -> None:
    settings = LocalSettings(BATCH, outer_lr=0.7, outer_momentum=0.9, nesterov=True)
    file = replace(file, local=settings, batch=BatchSettings())
    asked: list[BatchSizeLimits] = []
    runs: list[LocalRun] = []

    def open_run(who: Joining, parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> LocalRun:
        assert who.local is not None and who.local.batch_size == BATCH and type(optimizer) is torch.optim.SGD
        assert {key: optimizer.param_groups[0][key] for key in ("lr", "momentum", "nesterov", "weight_decay")} == {
            "lr": 0.7,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 0,
        }
        runs.append(DriftingRun(parameters, who.local.inner, TARGET))
        return runs[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "find_batch_size", lambda _, limits: asked.append(limits) or 2)
        setup = prepared(file, said := [])
    joining.take_part(setup, who(), open_run, threading.Event(), said.append)
    assert asked[0].max_size == BATCH and runs[0].rates == [file.optimizer.rate(step) for step in range(STEPS)]
    saved = CheckpointDirectory(tmp_path / "checkpoints").read(STEPS)
    assert not any(parameter.any() for parameter in saved.parameters.values())
    assert any(parameter.any() for parameter in setup.model.parameters())
    assert saved.optimizer["param_groups"][0]["lr"] == 0.7
    with pytest.raises(ValueError, match="is of another model or optimizer: expected another directory"):
        joined(replace(file, local=LocalSettings(), batch=BatchSettings(size=BATCH)), [])


@pytest.mark.parametrize("damaged", ["model.safetensors", "training/checkpoint.json"])
def test_a_run_goes_on_from_the_newest_checkpoint_that_is_intact(file: RunFile, tmp_path: Path, damaged: str) -> None:
    directory = tmp_path / "checkpoints"
    file = replace(file, run=replace(file.run, keep=3))
    joined(file, [])
    assert CheckpointDirectory(directory).steps() == [2, 4, 6]
    truncated = directory / "step-000000006" / damaged
    truncated.write_bytes(truncated.read_bytes()[:-20])
    given, _ = rejoined(file, said := [], 4, 1)
    assert given.resumed_at == Moment(0, 4) and "goes on from the checkpoint of step 4" in said
    (warning,) = [line for line in said if line.startswith("warning")]
    assert damaged in warning and warning.endswith("damaged-1-step-000000006 is not used")
    assert CheckpointDirectory(directory).read(6).rollbacks == 1  # written again, by the run that goes on
    assert (directory / "damaged-1-step-000000006" / damaged).exists()
    for step in (2, 4, 6):
        (directory / f"step-{step:09d}" / damaged).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has no checkpoint that is intact: .*expected another directory"):
        joined(file, [])
    assert CheckpointDirectory(directory).steps() == [2, 4, 6]


def test_a_run_that_is_founded_again_and_again_keeps_its_checkpoint(file: RunFile, tmp_path: Path) -> None:
    """A ledger counts rollbacks that no checkpoint knows of."""
    joined(file, [], stop_after=4)
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    for rollbacks in (1, 2, 3):
        given, setup = rejoined(file, [], 4, rollbacks, is_stopping=True)
        assert given.resumed_at == Moment(0, 4)
        saved = checkpoints.read(4).parameters
        assert all(torch.equal(each, saved[name]) for name, each in setup.model.named_parameters())
    assert checkpoints.steps() == [2, 4]


def test_who_joins_goes_on_with_its_data_and_without_newer_checkpoints(
    file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The founder had only an older one: there is one run, and nothing is lost."""
    file = replace(file, run=replace(file.run, keep=3))
    joined(file, [])
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    taken = checkpoints.read(4).data["taken"]
    monkeypatch.setattr(joining, "train", lambda *_arguments: None)
    given, setup = rejoined(file, said := [], 4, 1, OTHERS)
    assert given.resumed_at == Moment(0, 6)  # which it offers, and the others have begun already
    assert setup.batches.state_dict()["taken"] == taken > 0
    assert checkpoints.steps() == [2, 4] and (tmp_path / "checkpoints" / "unused-1-step-000000006").is_dir()
    assert sum("the run is at step 4, and goes on without the newer checkpoints here" in line for line in said) == 1


@pytest.mark.parametrize("joins", [True, False])
def test_the_newest_checkpoint_may_be_that_of_another_peer(
    joins: bool, file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who joins had the newest one, which the run goes on from; or the founder had an older one. Both keep theirs."""
    joined(file, [], stop_after=4)
    checkpoints, newest = CheckpointDirectory(tmp_path / "checkpoints"), 4 if joins else 6
    monkeypatch.setattr(joining, "train", lambda *_arguments: None)
    given, _ = rejoined(file, [], newest, 3, OTHERS if joins else ())
    assert given.resumed_at == Moment(0, 4)
    assert checkpoints.steps() == [2, 4]


def test_who_joins_is_not_hindered_by_a_checkpoint_that_cannot_be_read(file: RunFile, tmp_path: Path) -> None:
    joined(file, [], stop_after=4)
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    (checkpoints.path(4) / "training" / "checkpoint.json").write_text("{")
    checkpoints.require_of("run")
    checkpoints.discard_undone(rollbacks=0, went_back_to=0)
    assert checkpoints.steps() == [2]
    assert (tmp_path / "checkpoints" / "damaged-1-step-000000004").is_dir()


def test_checkpoints_of_other_runs_and_of_undone_steps_are_told_apart(file: RunFile, tmp_path: Path) -> None:
    joined(replace(file, run=replace(file.run, keep=9)), [])
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints", keep=9)
    assert checkpoints.steps() == [2, 4, 6]
    with pytest.raises(CheckpointError, match="has checkpoints of run 'run': expected another directory"):
        joined(replace(file, run=replace(file.run, name="o")), [])
    other = replace(file, model=replace(file.model, preset="small"))
    with pytest.raises(ValueError, match="is of another model or optimizer: expected another directory"):
        joined(other, [])
    checkpoints.discard_undone(rollbacks=1, went_back_to=5)
    assert checkpoints.steps() == [2, 4]
    checkpoints.discard_undone(rollbacks=2, went_back_to=5)
    assert checkpoints.steps() == []


def test_every_step_is_reported_with_the_loss_of_its_batch(file: RunFile) -> None:
    place = Kept()
    setup = replace(prepared(file, []), reports=StepReports([place]))
    runs: list[LocalRun] = []

    def open_run(_who: Joining, *arguments: Any) -> LocalRun:
        runs.append(LocalRun(*arguments, TARGET))
        runs[0].records = [Progress("run", IDENTITY.peer_id, step=1, samples_per_s=2.5, bytes_sent=7)]
        return runs[0]

    joining.take_part(setup, who(), open_run, threading.Event(), str)
    assert len(place.added) == STEPS and runs[0].last_loss == place.added[-1][1]["loss/training"]
    for step, (_, scalars) in enumerate(place.added):
        assert scalars["learning_rate"] == file.optimizer.rate(0)  # that of step 1, which the record says
        assert scalars["samples_per_s/total"] == 2.5 and scalars["bytes/sent"] == 7, step


def test_what_does_not_fit_into_the_memory_is_listed(file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample takes 10 MiB of activations, beside the gradients."""

    def prepare(memory: int, size: int = 6) -> list[str]:
        said: list[str] = []
        sized = replace(file, batch=BatchSettings(size=size))
        joining.prepare(sized, who(), EVERYTHING, "cpu", said.append, memory)
        return said

    least = total(parts := volunteer_parts(file, prepared(file, []).model))
    gradients = parts["gradients"]
    monkeypatch.setattr(joining, "computing", lambda _model, _loss: lambda n: Trial(n, 0.0, gradients + 10 * MIB * n))
    with pytest.raises(ValueError, match=r"--memory is 256MiB: expected more than \d+MiB, for weights \d+MiB, optim"):
        prepare(256 * MIB)
    with pytest.raises(ValueError, match=r"leaves 59MiB for activations, and those of 6 samples at once take 60MiB"):
        prepare(least + 59 * MIB)
    with pytest.raises(ValueError, match="those of 1 samples at once take 10MiB"):
        prepare(least + 9 * MIB, size=0)
    assert prepare(least + 60 * MIB)[1] == f"memory up to {mib(least)} and activations: {listed(parts)}"
    assert prepare(least + 59 * MIB, size=0)[0] == "4 samples at once on cpu"
