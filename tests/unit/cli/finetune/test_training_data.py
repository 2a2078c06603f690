"""Lines of text become examples, and lines that are wrong are named."""

from __future__ import annotations

import json

import pytest

from swarm_cli.finetune.settings import check_file
from swarm_cli.finetune.training_data import IGNORED, Padding, Tokenizing, TrainingText, load_examples, read_texts
from swarm_client.generation.generation import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def test_text_ends_with_the_end_and_all_of_it_is_learned(tokenizer):
    (example,) = Tokenizing(tokenizer, 64).examples(TrainingText("Return a list."))
    assert tokenizer.decode(example["input_ids"]) == "<s>Return a list.</s>"
    assert example["labels"] == example["input_ids"]


def test_a_long_text_is_cut_and_nothing_is_lost(tokenizer):
    text = "Return a list of the names of all things. " * 5
    examples = list(Tokenizing(tokenizer, 16).examples(TrainingText(text)))
    assert [len(example["input_ids"]) for example in examples[:-1]] == [16] * (len(examples) - 1)
    ids = [token for example in examples for token in example["input_ids"]]
    assert tokenizer.decode(ids) == f"<s>{text}</s>"


def test_of_a_prompt_the_completion_is_learned(tokenizer):
    (example,) = Tokenizing(tokenizer, 64).examples(TrainingText(" a list.", "Return"))
    learned = [label for label in example["labels"] if label != IGNORED]
    assert tokenizer.decode(example["input_ids"]) == "<s>Return a list.</s>"
    assert tokenizer.decode(learned) == " a list.</s>"
    assert example["input_ids"][-len(learned) :] == learned


def test_a_prompt_begins_as_it_does_in_generation(tokenizer):
    (example,) = Tokenizing(tokenizer, 64).examples(TrainingText(" a list.", "Return"))
    prompt = tokenizer("Return").input_ids
    assert example["input_ids"][: len(prompt)] == prompt


@pytest.mark.parametrize(("prompt", "completion"), [(50, 5), (5, 50), (50, 50)])
def test_what_is_too_long_loses_the_beginning_of_its_prompt(tokenizer, prompt, completion):
    text = TrainingText(" list" * completion, " name" * prompt)
    (example,) = Tokenizing(tokenizer, 16).examples(text)
    assert len(example["input_ids"]) == len(example["labels"]) == 16
    assert example["labels"][0] == IGNORED and example["labels"][-1] != IGNORED


def test_padding_is_not_learned(tokenizer):
    rows = [{"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = Padding(tokenizer)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [8, IGNORED, IGNORED]]


def test_files_of_text_and_of_json(tmp_path):
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_bytes("\ufefffirst\r\n\n  second\n".encode())
    lines.write_text('{"text": "one", "id": 7}\n\n{"prompt": "", "completion": "two"}\n')
    assert list(read_texts(plain)) == [TrainingText("first"), TrainingText("  second")]
    assert list(read_texts(lines)) == [TrainingText("one"), TrainingText("two", "")]


WRONG_LINES = {
    '{"text": ': "line 2 of .* is not JSON: Expecting value at character",
    "[1]": 'line 2 of .* is no object with a string "text", or strings "prompt" and "completion"',
    '{"text": 1}': "line 2 of .* is no object",
    '{"prompt": "x"}': "line 2 of .* is no object",
    '{"text": ""}': 'line 2 of .* has an empty "text"',
    '{"prompt": "x", "completion": ""}': 'line 2 of .* has an empty "completion"',
    "\udcff": "line 2 of .* is not UTF-8 text",
}


@pytest.mark.parametrize("line", WRONG_LINES)
def test_a_wrong_line_is_named_by_its_number(tokenizer, tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_bytes(f'{{"text": "good"}}\n{line}\n'.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=WRONG_LINES[line]):
        load_examples(file, Tokenizing(tokenizer, 8), tmp_path / "cache")


@pytest.mark.parametrize("content", ["\n \n", ""])
def test_no_text(tokenizer, tmp_path, content):
    file = tmp_path / "a.txt"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"is empty|all its lines are blank"):
        load_examples(file, Tokenizing(tokenizer, 8), tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no.txt", "does not exist"),
        ("no", "does not exist"),
        ("a.csv", r"is neither \.txt nor \.jsonl"),
        ("folder.txt", "is not a file"),
    ],
)
def test_what_is_no_file_of_text(tmp_path, name, reason):
    (tmp_path / "a.csv").touch()
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ValueError, match=reason):
        check_file(tmp_path / name)


def test_examples_stay_on_disk_and_follow_the_file(tokenizer, tmp_path):
    file, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    file.write_text("".join(json.dumps({"text": f"number {number}"}) + "\n" for number in range(50)))
    found = load_examples(file, Tokenizing(tokenizer, 8), cache)
    assert len(found) == 50 and found.cache_files
    assert all(str(cache) in part["filename"] for part in found.cache_files)
    file.write_text('{"text": "other"}\n')
    (example,) = load_examples(file, Tokenizing(tokenizer, 8), cache)
    assert tokenizer.decode(example["input_ids"]) == "<s>other</s>"
