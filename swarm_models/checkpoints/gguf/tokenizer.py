"""The tokenizer of a model, with its chat template; a GGUF file contains its own."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swarm_models.checkpoints.files import FileMissing, LocalFiles, locate


def read_tokenizer(name_or_path: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer; raise CheckpointError, or any error that untrusted files cause in the libraries."""
    files = locate(str(name_or_path), revision, None)
    gguf = None
    with suppress(FileMissing):  # a tokenizer needs no config.json
        gguf = files.gguf
    tokenizer: PreTrainedTokenizerBase
    if gguf is None:
        if isinstance(files, LocalFiles):
            files.check_links()
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, revision=revision, trust_remote_code=False)
        return tokenizer
    path = files.path(gguf).absolute()
    with tempfile.TemporaryDirectory() as empty:  # and not the file's own, where another model's tokenizer may be
        tokenizer = AutoTokenizer.from_pretrained(empty, gguf_file=str(path), trust_remote_code=False)
    tokenizer.name_or_path = str(name_or_path)  # and not the temporary directory
    return tokenizer
