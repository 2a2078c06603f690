"""What a fine-tuning run may be told, and when it is the run that is in a directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarm_cli.finetune.finetune import CURVE, RUN, TOKENS, check_output, require_extras, write_run
from swarm_cli.finetune.settings import FinetuneSettings

SETTINGS = FinetuneSettings(Path("data.txt"), Path("output"))

MISTAKES = {
    "method": ({"method": "qlora"}, "method 'qlora' is unknown: expected one of lora, prompt, deep-prompt"),
    "schedule": ({"schedule": "step"}, "schedule 'step' is unknown"),
    "optimizer": ({"optimizer": "sgd"}, "optimizer 'sgd' is unknown: expected one of adamw, adamw-8bit"),
    "rank": ({"rank": 0}, "rank is 0: expected at least 1"),
    "steps": ({"max_steps": -3}, "max_steps is -3"),
    "rate": ({"learning_rate": float("nan")}, "learning_rate is nan: expected a number above 0"),
    "dropout": ({"lora_dropout": 1.0}, "lora_dropout is 1.0: expected 0 or more, and less than 1"),
    "length": ({"sequence_length": 1}, "sequence_length is 1"),
    "stopping": (
        {"early_stopping": 2, "validation_share": 0.0},
        "early_stopping and eval_every need a validation file",
    ),
    "intervals": ({"early_stopping": 2, "eval_every": 5, "save_every": 10}, "save_every and eval_every must be equal"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    fields, sentence = MISTAKES[name]
    with pytest.raises(ValueError, match=sentence):
        replace(SETTINGS, **fields)


def test_the_file_of_a_run_is_replaced_as_a_whole(tmp_path: Path) -> None:
    settings, run, opened = replace(SETTINGS, output=tmp_path), tmp_path / RUN, tmp_path / "opened"
    write_run(settings, {"data": "first"})
    opened.hardlink_to(run)  # what a reader sees that has opened the file
    before = run.read_text()
    write_run(settings, {"data": "second"})
    assert opened.read_text() == before and "second" in run.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {run.name, opened.name}


def test_early_stopping_saves_what_it_validates():
    settings = replace(SETTINGS, early_stopping=2, eval_every=5)
    assert settings.save_interval == settings.eval_interval == 5


def test_a_run_is_resumed_with_the_same_settings_but_may_be_longer():
    earlier = SETTINGS.as_json()
    replace(SETTINGS, resume=True, epochs=9.0, swarm="other").require_same(earlier)
    with pytest.raises(ValueError, match=r"has --learning-rate None, not 0\.1: give the same value"):
        replace(SETTINGS, learning_rate=0.1).require_same(earlier)


def test_a_run_is_resumed_with_the_same_data_wherever_it_is():
    earlier = SETTINGS.as_json({"data": "1234"})
    moved = replace(SETTINGS, data=Path("elsewhere.txt"), resume=True)
    moved.require_same(earlier)
    moved.require_same_data(earlier, {"data": "1234"})
    with pytest.raises(ValueError, match="--data is not what the run in output has begun with"):
        moved.require_same_data(earlier, {"data": "5678"})
    with pytest.raises(ValueError, match="--validation is not what"):
        moved.require_same_data(earlier, {"data": "1234", "validation": "5678"})


def test_directories(tmp_path):
    new = replace(SETTINGS, output=tmp_path / "a" / "new")
    check_output(new)
    (new.output / TOKENS).mkdir()
    check_output(new)  # an attempt that came to nothing
    with pytest.raises(ValueError, match="has no run to resume"):
        check_output(replace(new, resume=True))
    (new.output / RUN).write_text(new.as_json())
    check_output(replace(new, resume=True))
    with pytest.raises(ValueError, match="has a run already: go on with it by --resume"):
        check_output(new)
    (new.output / RUN).rename(new.output / CURVE)
    with pytest.raises(ValueError, match="is not empty"):
        check_output(new)
    with pytest.raises(ValueError, match=r"loss\.png cannot be made"):
        check_output(replace(new, output=new.output / CURVE))


def test_a_missing_package_is_named():
    require_extras()
    with pytest.raises(ValueError, match="finetune needs no_such_package: pip install no_such_package"):
        require_extras(("json", "no_such_package"))
