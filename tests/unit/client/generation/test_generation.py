"""What the generate command asks of ``generate``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_client.generation.generation import load_tokenizer, stream_text
from swarm_client.generation.text_options import TextOptions
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_protocol.errors import CheckpointError


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {}),  # the model's own generation config decides
        ({"temperature": 0}, {"do_sample": False}),
        ({"temperature": 0, "top_p": 0.5}, {"do_sample": False}),
        ({"temperature": 0.7}, {"do_sample": True, "temperature": 0.7}),
        ({"top_k": 5}, {"do_sample": True, "top_k": 5}),
        ({"top_p": 0.9, "temperature": 1.5}, {"do_sample": True, "top_p": 0.9, "temperature": 1.5}),
    ],
)
def test_sampling_arguments(options, arguments):
    always = {"max_new_tokens": 7, "num_beams": 1}
    assert TextOptions(max_new_tokens=7, **options).as_arguments() == always | arguments


@pytest.mark.parametrize(
    "options",
    [{"max_new_tokens": 0}, {"temperature": -0.1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": 0}, {"num_beams": 0}],
)
def test_values_out_of_range_say_what_was_expected(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*expected"):
        TextOptions(**options)


TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
CODE = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (TOKENIZER, "{"),
        (TOKENIZER, "[" * 100_000),
        (TOKENIZER, '{"model": {"type": "BPE", "vocab": 3}}'),
        (CONFIG, "[" * 100_000),
        (CONFIG, "[]"),
        (CONFIG, json.dumps(CODE)),
    ],
)
def test_tokenizers_that_are_damaged_or_need_code_of_their_own(tmp_path, name, content):
    for path in Path(locate(DEFAULT_MODEL)).iterdir():
        shutil.copy(path, tmp_path)
    assert load_tokenizer(str(tmp_path))("def").input_ids
    (tmp_path / name).write_text(content)
    (tmp_path / "code.py").write_text("raise SystemExit('it was run')")
    if content == json.dumps(CODE):  # there is nothing else to fall back on
        (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer can be read from") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_does_not_lead_out_of_the_directory(tmp_path):
    (tmp_path / "model").mkdir()
    for path in Path(locate(DEFAULT_MODEL)).iterdir():
        shutil.copy(path, tmp_path / "model")
    (tmp_path / "model" / TOKENIZER).rename(tmp_path / TOKENIZER)
    (tmp_path / "model" / TOKENIZER).symlink_to(tmp_path / TOKENIZER)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link to .*: expected the file itself"):
        load_tokenizer(str(tmp_path / "model"))


class Echo:
    """Stands for a model that answers with the prompt."""

    device = torch.device("cpu")

    def generate(self, ids: torch.Tensor, *, attention_mask: torch.Tensor, streamer: Any, **_options: Any) -> Any:
        assert attention_mask.shape == ids.shape and attention_mask.all()
        for part in (ids, *ids[0, :, None]):
            streamer.put(part)
        streamer.end()
        return torch.cat([ids, ids], 1)


def test_a_question_is_asked_by_the_chat_template_and_a_text_is_continued(capsys):
    tokenizer = load_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %} Answer:"
    asked = stream_text(Echo(), tokenizer, "Why", TextOptions(max_new_tokens=3, temperature=0), is_question=True)
    assert asked.token_ids == tokenizer("<user>Why Answer:", add_special_tokens=False).input_ids
    assert capsys.readouterr().out == "Why\n<user>Why Answer:\n"
    continued = stream_text(Echo(), tokenizer, "Why", TextOptions(max_new_tokens=3, temperature=0))
    assert continued.token_ids == tokenizer("Why").input_ids
