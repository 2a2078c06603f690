"""Run files: the example says the truth, and mistakes are named by table, key and what was expected."""

from __future__ import annotations

import re
from dataclasses import fields
from math import cos, pi
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from transformers import get_scheduler

from swarm_protocol.access.organiser import OrganiserKey
from swarm_training.runfile.example import example
from swarm_training.runfile.reading import parse_run_file, read_run_file
from swarm_training.runfile.settings import OptimizerSettings, RunFile

SMALLEST = {
    "run": 'name = "my-run"\ntarget_batch_size = 1024',
    "model": 'name_or_path = "gpt2"',
    "data": 'source = "texts"\nblock_length = 512',
    "optimizer": 'name = "adamw"\nlr = 1e-3',
}


def text(**tables: str) -> str:
    return "\n".join(f"[{name}]\n{content}" for name, content in {**SMALLEST, **tables}.items())


def test_the_example_is_the_smallest_file_and_its_comments_have_all_other_keys_with_their_defaults() -> None:
    smallest = parse_run_file(text())
    assert parse_run_file(example("RUN.toml")) == smallest
    # Comments that hold a key and its value become lines, except the preset, which takes the place of another key.
    full = re.sub(r"^# (?=\w+ = )(?!preset)", "", example("RUN.toml"), flags=re.MULTILINE)
    assert parse_run_file(full) == smallest
    for table, kind in get_type_hints(RunFile).items():
        part = example("RUN.toml").split(f"[{table}]")[1].split("\n[")[0]
        assert set(re.findall(r"^(?:# )?(\w+) = ", part, re.MULTILINE)) == {field.name for field in fields(kind)}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (text(run="target_batch_size = 4"), r"\[run\] has no name: expected a string"),
        (text(run='name = "x"\ntarget_batch_size = 4.5'), r"has target_batch_size = 4\.5: expected a whole number"),
        (text(run='name = "x"\ntarget_batch_size = true'), r"has target_batch_size = True: expected a whole number"),
        (text(run='name = "x"\ntarget_batch_size = 0'), r"\[run\] target_batch_size is 0: expected at least 1"),
        (
            text(run='name = "x"\ntarget_batch_size = 1\nrestart_wait_s = 90'),
            r"\[run\] restart_wait_s is 90\.0: expected seconds, 0 to 55",
        ),
        (text(run=f'name = "x"\ntarget_batch_size = {1 << 50}'), r"\[run\] target_batch_size is \d+: expected at most"),
        (text(model=f'name_or_path = "gpt2"\nseed = {1 << 64}'), r"\[model\] seed is \d+: expected -2\*\*63 to"),
        (text(optimizer='name = "sgd"\nlr = 1\ntotal_steps = -1'), r"total_steps is -1: expected at least 1, or 0"),
        (text(run='name = "a b"\ntarget_batch_size = 1'), r"\[run\] name is 'a b': expected 1 to 64 letters"),
        (text(model="preset = 3"), r"\[model\] has preset = 3: expected a string"),
        (text(model=""), r"\[model\] name_or_path and preset: expected one of the two"),
        (text(model='preset = "tiny"'), r"\[model\] tokenizer is missing"),
        (text(model='preset = "x"'), r"\[model\] preset is 'x': expected one of tiny, small"),
        (text(model='name_or_path = "gpt2"\ninit = "zero"'), r"init is 'zero': expected one of random, pretrained"),
        (text(data='source = "x"\nblock_length = 1'), r"\[data\] block_length is 1: expected at least 2 tokens"),
        (text(data='source = "x"\nblock_length = 9\nstreaming = 1'), r"has streaming = 1: expected true or false"),
        (text(optimizer='name = "lion"\nlr = 1'), r"\[optimizer\] name is 'lion': expected one of adamw"),
        (text(optimizer='name = "sgd"\nlr = "1"'), r"\[optimizer\] has lr = '1': expected a number"),
        (text(optimizer='name = "sgd"\nlr = nan'), r"\[optimizer\] lr is nan: expected a number above 0"),
        (
            text(optimizer='name = "sgd"\nlr = 1\nschedule = "cosine"\nwarmup_steps = 5\ntotal_steps = 5'),
            r"total_steps is 5: expected more than the 5 of warmup_steps, since the schedule is cosine",
        ),
        (text(optimizer='name = "sgd"\nlr = 1\nrate = 2'), r"unknown key 'rate': expected name, lr, weight_decay"),
        (
            text(optimizer='name = "sgd"\nlr = 1\naverage_decay = 1'),
            r"average_decay is 1\.0: expected a number from 0 .* to less than 1",
        ),
        (
            text(optimizer='name = "muon"\nlr = 1'),
            r"name of \[optimizer\] is 'muon': expected another without \[local\]",
        ),
        (text(averaging='codec = "bf16"'), r"\[averaging\] codec is 'bf16': expected one of fp32, fp16, int8"),
        (text(averaging="error_feedback = true"), r"error_feedback is true: expected a codec other than fp32 with it"),
        (text(averaging='codec = "2bit"'), r"codec is '2bit': expected error_feedback = true with it"),
        (text(averaging="power_sgd_rank = -1"), r"power_sgd_rank is -1: expected 0 \(off\)"),
        (text(averaging="power_sgd_rank = 4\ndelay = true"), r"power_sgd_rank is 4: expected 0 with a delay"),
        (text(averaging="straggler_s = -1"), r"\[averaging\] straggler_s is -1\.0: expected seconds, 0"),
        (text(clip="max_norm = -1"), r"\[clip\] max_norm is -1.0: expected a number of at least 0"),
        (text(clip="max_norm = inf"), r"\[clip\] max_norm is inf: expected a number of at least 0"),
        (text(rollback="margin = 0"), r"\[rollback\] margin is 0.0: expected a number above 0"),
        (text(rollback="margin = nan"), r"\[rollback\] margin is nan: expected a number above 0"),
        (text(rollback="patience = 0"), r"\[rollback\] patience is 0: expected 1 to"),
        (text(rollback="window = 10"), r"\[rollback\] warmup is 20: expected at most the window, which is 10"),
        (text(batch="size = 300"), r"\[batch\] size is 300: expected 0 \(find out\) to max_size, which is 256"),
        (text(tokens='organiser = "abc"'), r"\[tokens\] 'abc' is no swarm key"),
        (text(local="batch_size = -1"), r"\[local\] batch_size is -1: expected at least 1, or 0 \(no local steps\)"),
        (text(local="outer_lr = 0"), r"\[local\] outer_lr is 0.0: expected a number above 0"),
        (text(local="outer_momentum = 1"), r"\[local\] outer_momentum is 1.0: expected a number from 0 to less than 1"),
        (text(local="nesterov = true"), r"\[local\] nesterov is true: expected an outer_momentum above 0 with it"),
        (
            text(local="batch_size = 1025"),
            r"batch_size of \[local\] is 1025: expected at most .* \[run\], which is 1024",
        ),
        (
            text(local="batch_size = 8", stages="count = 2\naudit_share = 0.1"),
            r"audit_share of \[stages\] is 0.1: expected 0 with \[local\] in a run in stages, since peers of",
        ),
        (
            text(local="batch_size = 8", stages="count = 2", clip="max_norm = 1"),
            r"max_norm of \[clip\] is 1.0: expected 0 with \[local\] in a run in stages, since a local step knows",
        ),
        (
            text(local="batch_size = 8", stages="count = 2", evaluation='every = 5\nsource = "x"'),
            r"every of \[evaluation\] is 5: expected 0 with \[local\] in a run in stages, since no stage",
        ),
        (
            text(local="batch_size = 8", stages="count = 2", optimizer='name = "muon"\nlr = 1'),
            r"name of \[optimizer\] is 'muon': expected another in a run in stages, since its steps differ",
        ),
        (
            text(local="batch_size = 8", stages="count = 3", model='preset = "tiny"\ntokenizer = "gpt2"'),
            r"preset of \[model\] is 'tiny': expected a name_or_path with \[local\] in a run in stages",
        ),
        (
            text(local="batch_size = 8", stages="count = 2\nmicro_batch_size = 16"),
            r"batch_size of \[local\] is 8: expected a multiple of the micro_batch_size of \[stages\], which is 16",
        ),
        (
            text(
                local="batch_size = 8",
                stages='count = 2\nsums = "fp64"',
                averaging='codec = "int8"\nerror_feedback = true',
            ),
            r"sums of \[stages\] is 'fp64': expected fp32 with error_feedback, since fp64 loses nothing",
        ),
        (
            text(local="batch_size = 8", averaging="power_sgd_rank = 4"),
            r"power_sgd_rank of \[averaging\] is 4: expected 0, since it cannot be combined with \[local\]",
        ),
        (text(evaluation="every = 10"), r"\[evaluation\] source is '': expected held-out data, since every is 10"),
        (text(evaluation='source = "x"'), r"\[evaluation\] source is 'x': expected none without every, which is 0"),
        (text(evaluation="every = -1"), r"\[evaluation\] every is -1: expected at least 1 step, or 0"),
        (text(evaluation="patience = -1"), r"\[evaluation\] patience is -1: expected 1 to 4096, or 0"),
        (text(evaluation="least_improvement = -0.5"), r"least_improvement is -0.5: expected a number of at least 0"),
        (text(evaluation="every = 1\nleast_improvement = 0.5"), r"patience is 0: expected at least 1 with a least_imp"),
        (text(evaluation="patience = 3"), r"\[evaluation\] every is 0: expected at least 1 step with a patience"),
        (text(evaluation='every = 1\nsource = "x"\nsamples = 0'), r"\[evaluation\] samples is 0: expected at least 1"),
        (
            text(evaluation='every = 1\nsource = "texts"\nsplit = "train"'),
            r"source of \[evaluation\] is 'texts' with split 'train', as in \[data\]: expected other data",
        ),
        (
            text(extra=""),
            "an unknown table 'extra': expected run, model, data, optimizer, averaging, clip, rollback, batch, tokens",
        ),
        ("run = 3", "run is 3: expected a table"),
        ("[run", "is no valid TOML"),
        ("\ud800", "is not UTF-8 text"),
    ],
)
def test_mistakes_are_named(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "RUN.toml"
    path.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match=reason) as refusal:
        read_run_file(path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_stages_may_take_local_steps() -> None:
    found = parse_run_file(text(local="batch_size = 8", stages="count = 2\nmicro_batch_size = 4"))
    assert (found.local.batch_size, found.stages.count) == (8, 2)


def test_a_file_that_is_not_there_or_too_large_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No such file or directory: `swarm train init .*RUN.toml` writes an example"):
        read_run_file(tmp_path / "RUN.toml")
    (tmp_path / "RUN.toml").write_text("#" * (2 << 20))
    with pytest.raises(ValueError, match="is too large for a run file"):
        read_run_file(tmp_path / "RUN.toml")


def test_whole_numbers_stand_for_numbers_and_the_organisers_key_is_kept() -> None:
    key = str(OrganiserKey.generate().public)
    found = parse_run_file(text(optimizer='name = "sgd"\nlr = 1', tokens=f'organiser = "{key.upper()}"'))
    assert (found.optimizer.lr, found.tokens.organiser) == (1.0, key)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rates_are_those_of_transformers(schedule: str) -> None:
    """Which counts the warm-up from 0, so that its step k has our rate of step k − 1 there."""
    settings = OptimizerSettings("adamw", 0.3, schedule=schedule, warmup_steps=4, total_steps=20)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3)
    reference = get_scheduler(schedule, optimizer, 4, 20)
    theirs = []
    for _ in range(25):
        theirs.append(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()
    ours = [settings.rate(step) for step in range(25)]
    assert ours[:4] == pytest.approx(theirs[1:5]) and ours[4:21] == pytest.approx(theirs[4:21])
    assert ours[20:] == [0.0] * 5  # a cosine of theirs would rise again
    assert settings.rate(12) == pytest.approx(0.15 if schedule == "linear" else 0.3 * (1 + cos(pi / 2)) / 2)


def test_a_constant_rate_stays() -> None:
    settings = OptimizerSettings("adamw", 0.5, warmup_steps=2)
    assert [settings.rate(step) for step in (0, 1, 2, 10**9)] == [0.25, 0.5, 0.5, 0.5]
