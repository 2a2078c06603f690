"""What the generate command asks of ``generate``."""

from __future__ import annotations

import pytest

from swarm_client.generation.generation import load_tokenizer
from swarm_client.generation.text_options import TextOptions
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


def test_model_without_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer can be read from"):
        load_tokenizer(str(tmp_path))
