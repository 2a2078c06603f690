"""The conversion of text files to examples of token ids, line by line and kept on disk, for files above memory size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from swarm_cli.finetune.settings import check_file

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label of tokens without a loss


@dataclass(frozen=True)
class TrainingText:
    """One document, or the continuation of a prompt. Only the ``completion`` is learned."""

    completion: str
    prompt: str | None = None


@dataclass(frozen=True)
class Tokenizing:
    """The conversion of texts to examples."""

    tokenizer: PreTrainedTokenizerBase
    sequence_length: int

    def examples(self, text: TrainingText) -> Iterator[dict[str, list[int]]]:
        """Yield ``input_ids`` and ``labels``. A long document is split; a long prompt loses its beginning."""
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        if text.prompt is None:
            ids = _without_end(self.tokenizer(text.completion).input_ids, end) + end
            for start in range(0, len(ids), self.sequence_length):
                part = ids[start : start + self.sequence_length]
                if len(part) > 1:  # one token predicts nothing
                    yield {"input_ids": part, "labels": part}
            return
        prompt = _without_end(self.tokenizer(text.prompt).input_ids, end)
        completion = self.tokenizer(text.completion, add_special_tokens=False).input_ids + end
        completion = completion[: self.sequence_length - 1]
        prompt = prompt[max(0, len(prompt) + len(completion) - self.sequence_length) :]
        if len(prompt) + len(completion) > 1:
            yield {"input_ids": prompt + completion, "labels": [IGNORED] * len(prompt) + completion}


@dataclass(frozen=True)
class Padding:
    """A collator that makes batches [examples, tokens]. It pads shorter examples on the right, without a loss there."""

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        def padded(rows: list[list[int]], value: int) -> torch.Tensor:
            return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

        ids = [example["input_ids"] for example in examples]
        return {
            "input_ids": padded(ids, self.tokenizer.pad_token_id or 0),
            "attention_mask": padded([[1] * len(row) for row in ids], 0),
            "labels": padded([example["labels"] for example in examples], IGNORED),
        }


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_texts(path: Path) -> Iterator[TrainingText]:
    """Yield the text of each line that is not blank.

    A line of .jsonl is an object with "text", or with "prompt" and "completion".

    Raises:
        ValueError: a line is something else; the message has its number.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode().strip("\r\n").removeprefix("\ufeff")  # the mark with which Windows begins files
            except UnicodeDecodeError:
                raise ValueError(f"line {number} of {path} is not UTF-8 text") from None
            if text.strip():
                yield TrainingText(text) if path.suffix == ".txt" else _from_json(text, f"line {number} of {path}")


def load_examples(path: Path, tokenizing: Tokenizing, cache: Path) -> Dataset:
    """Return all examples of a file, as a table that is read from disk as needed.

    Args:
        cache: a directory for the table; a table there is used again unless the file or the tokenizing has changed.

    Raises:
        ValueError: a line is wrong, or there are no examples.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError

    check_file(path)
    features = {name: datasets.Sequence(datasets.Value("int32")) for name in ("input_ids", "labels")}

    def examples() -> Iterator[dict[str, list[int]]]:
        found = False
        for text in read_texts(path):
            for example in tokenizing.examples(text):
                found = True
                yield example
        if not found:
            raise ValueError(f"{path} has no text to learn from: all its lines are blank, or of a single token")

    datasets.disable_progress_bars()
    try:
        return datasets.Dataset.from_generator(
            examples, datasets.Features(features), cache_dir=str(cache), fingerprint=_fingerprint(path, tokenizing)
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def _from_json(line: str, where: str) -> TrainingText:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError(f"{where} is not JSON that can be read: it is nested too deeply") from None
    names = ("prompt", "completion") if isinstance(fields, dict) and "text" not in fields else ("text",)
    if not isinstance(fields, dict) or not all(isinstance(fields.get(name), str) for name in names):
        raise ValueError(f'{where} is no object with a string "text", or strings "prompt" and "completion"')
    if not fields[names[-1]]:
        raise ValueError(f'{where} has an empty "{names[-1]}": expected some text to learn')
    return TrainingText(fields[names[-1]], fields.get("prompt") if len(names) == 2 else None)


def _without_end(ids: list[int], end: list[int]) -> list[int]:
    """Return ``ids`` without the end token that some tokenizers add, because a prompt must continue."""
    return ids[:-1] if end and ids[-1:] == end else ids


def _fingerprint(path: Path, tokenizing: Tokenizing) -> str:
    stat = path.stat()
    facts = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, tokenizing.sequence_length]
    vocabulary = sorted(tokenizing.tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps([facts, vocabulary]).encode()).hexdigest()[:32]
