"""``python -m swarm_training.stages``: mistakes end in a sentence before anybody is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarm_protocol.access.organiser import OrganiserKey
from swarm_training.compression.settings import AveragingSettings
from swarm_training.runfile.reading import parse_run_file
from swarm_training.runfile.settings import ClipSettings, LocalSettings, ModelSettings, RunFile, TokenSettings
from swarm_training.runfile.stage_settings import WIRE_FORMS, StageSettings
from swarm_training.stages.command_line import main
from swarm_training.stages.commands.building import (
    build_micro_batches,
    require_same_count,
    require_stages,
    stage_options,
    training_config,
)
from swarm_training.stages.commands.inference import after_last_step
from swarm_training.stages.compress.layers import BoundaryCompression
from swarm_training.stages.rpc.forms import FORMS

TEXT = """
[run]
name = "toy"
target_batch_size = 12
[model]
preset = "tiny"
tokenizer = "nowhere"
[data]
source = "nothing"
block_length = 16
[optimizer]
name = "adamw"
lr = 1e-3
[stages]
count = 2
micro_batch_size = 4
"""
PEER = "/ip4/127.0.0.1/tcp/1/p2p/QmTvC4hj37objEfJKxFUgEcEznQCPwZmu8XD9msqh8Zv4e"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "RUN.toml"
    path.write_text(TEXT)
    return path


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as end:
        main([str(each) for each in arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--stage", "2"], "--stage is 2: expected 0 to 1"),
        (["serve", "--stage", "-1"], "--stage is -1: expected 0 to 1"),
        (["serve", "--stage", "0", "--num-stages", "0"], "not trained in stages: expected their number"),
        (["serve", "--stage", "0", "--steps", "5"], "--steps is 5: expected at least 1, and --then-serve"),
        (["serve", "--stage", "0", "--then-serve", "m", "--steps", "0"], "--steps is 0: expected at least 1, and"),
        (["serve", "--stage", "0", "--then-serve", "m"], "no last step: expected --steps, or total_steps"),
        (
            ["serve", "--stage", "0", "--then-serve", "m", "--steps", "5", "--quant", "no"],
            "quantisation 'no' is unknown",
        ),
        (["serve", "--stage", "0", "--then-serve", __file__, "--steps", "5"], "is a file: expected a directory"),
        (["trainer"], "--initial-peers is missing"),
        (["trainer", "--initial-peers", PEER, "--steps", "0"], "--steps is 0: expected at least 1"),
        (["export", "out"], "--initial-peers is missing"),
    ],
)
def test_mistakes_end_in_a_sentence(
    run_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    said = refusal(capsys, arguments[0], run_file, *arguments[1:])
    assert message in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("micro_batch_size = 5", "target_batch_size is 12: expected 1 to 4096 times"),
        ("count = 0", "not trained in stages"),
        ('sums = "fp16"', "sums is 'fp16': expected one of fp32, fp64"),
        ('activations = "fp8"', "activations is 'fp8': expected one of fp32, fp64, bf16, int8"),
        ('precision = "int8"', "precision is 'int8': expected one of fp32, bf16"),
        ("lora_rank = -1", "lora_rank is -1"),
        ('layers = "bottleneck"', "layers is 'bottleneck': expected none, or bottleneck or maxout with the factor"),
        ('layers = "maxout:1"', "layers is 'maxout:1': expected none"),
        ('layers = "maxout:2"\nlora_rank = 4', "layers is maxout:2 and lora_rank 4: expected none of the two"),
        ("micro_batch_size = 0", "micro_batch_size is 0: expected at least 1"),
        ("audit_share = 1.5", "audit_share is 1.5: expected 0 (nothing is audited) to 1"),
    ],
)
def test_what_a_run_file_says_of_stages_is_checked(
    run_file: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    lines = [line for line in TEXT.splitlines() if not line.startswith(change.split(" =")[0] + " ")]
    run_file.write_text("\n".join([*lines, change]))
    assert message in refusal(capsys, "serve", run_file, "--stage", 0)


def settings(**stages: object) -> RunFile:
    file = parse_run_file(TEXT)
    return replace(file, stages=replace(file.stages, **stages))


def test_what_counts_exactly_cannot_be_compressed_with_memory_nor_copied_to_the_hub() -> None:
    assert require_stages(settings()) == 3
    with pytest.raises(ValueError, match="counts each micro-batch exactly"):
        require_stages(replace(settings(), averaging=AveragingSettings(codec="int8", error_feedback=True)))
    with pytest.raises(ValueError, match="hub is 'ada/run': expected none in a run in stages"):
        require_stages(replace(settings(), run=replace(settings().run, hub="ada/run")))
    with pytest.raises(ValueError, match="cannot be streamed"):
        build_micro_batches(replace(settings(), data=replace(settings().data, streaming=True)))


def local(**stages: object) -> RunFile:
    return replace(settings(**stages), model=ModelSettings("nowhere"), local=LocalSettings(batch_size=8))


def test_what_local_steps_change_of_a_run_in_stages(tmp_path: Path) -> None:
    averaging = AveragingSettings(codec="2bit", error_feedback=True)
    assert require_stages(replace(local(), averaging=averaging)) == 3
    with pytest.raises(
        ValueError,
        match=r"nothing under \[averaging\] but `codec`, `straggler_s` and, with \[local\], `error_feedback`",
    ):
        require_stages(replace(local(), averaging=AveragingSettings(delay=True)))
    assert training_config(settings()).straggler_s == 5 and training_config(local()).straggler_s == 600
    assert training_config(replace(local(), averaging=AveragingSettings(straggler_s=7))).straggler_s == 7
    file = replace(local(), run=replace(settings().run, checkpoints=str(tmp_path)))
    assert training_config(file).lasting_directory == tmp_path / "toy" / "2-stages-with-local-steps"
    (tmp_path / "toy" / "2-stages").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"of this run in 2 stages: .* \[local\] as it was then, or another directory"):
        require_same_count(file)


def test_some_runs_cannot_be_served_by_their_stages() -> None:
    ends = replace(settings(), optimizer=replace(settings().optimizer, total_steps=9))
    assert after_last_step(ends, Path("m"), None, "none").step == 9
    assert after_last_step(ends, Path("m"), 4, "none").step == 4
    with pytest.raises(ValueError, match="trains an adapter: expected servers of its base model"):
        after_last_step(settings(lora_rank=2), Path("m"), 4, "none")
    key = str(OrganiserKey.generate().public)
    with pytest.raises(ValueError, match="private: expected servers of the swarm's own"):
        after_last_step(replace(ends, tokens=TokenSettings(key)), Path("m"), None, "none")


def test_sums_in_fp64_are_averaged_in_fp64() -> None:
    assert training_config(settings(sums="fp64")).codec == "fp64"
    file = replace(settings(), averaging=AveragingSettings(codec="int8"), clip=ClipSettings(0.5))
    assert training_config(file).codec == "int8" and training_config(file).counting == "exact"
    assert training_config(file).max_norm == 0.5


def test_checkpoints_are_kept_on_disk() -> None:
    """In memory, they took 24 bytes per parameter, and those of the stage before as many."""
    config = training_config(settings())
    assert config.lasting_directory == Path("checkpoints") / "toy" / "2-stages"
    assert config.checkpoints_kept == settings().run.keep and config.checkpoint_directory is None
    none = replace(settings(), run=replace(settings().run, checkpoints=""))
    directory = training_config(none).checkpoint_directory
    assert directory is not None and directory.is_dir() and training_config(none).lasting_directory is None


def test_checkpoints_of_another_number_of_stages_are_refused(tmp_path: Path) -> None:
    file = replace(settings(), run=replace(settings().run, checkpoints=str(tmp_path)))
    require_same_count(file)
    (tmp_path / "toy" / "3-stages").mkdir(parents=True)
    with pytest.raises(ValueError, match="has checkpoints of this run in 3 stages: expected as many as `count`"):
        require_same_count(file)
    (tmp_path / "toy" / "2-stages").mkdir()
    require_same_count(file)


@pytest.mark.parametrize("layers", ["none", "bottleneck:4", "maxout:2", "maxout:1", "maxout:02", "none:2", "", "2"])
def test_run_files_and_stages_know_the_same_layers(layers: str) -> None:
    known = BoundaryCompression.parse(layers) if layers in ("none", "bottleneck:4", "maxout:2") else None
    if known is not None:
        assert stage_options(settings(layers=layers), "cpu").boundaries.layers == str(known)
        return
    with pytest.raises(ValueError, match="layers"):
        settings(layers=layers)


def test_run_files_and_the_wire_know_the_same_forms() -> None:
    assert tuple(FORMS) == WIRE_FORMS
    assert StageSettings().count == 0
