"""Where a checkpoint's files come from: a directory, or the hub and its local cache."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import HfApi, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from swarm_protocol.checkpoints.default_model import check_location
from swarm_protocol.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS, GGUF = ".safetensors", ".gguf"
_BEST_KNOWN = ("q4_k_m", "q8_0")  # of several GGUF files of a model: the one that most people take
_LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_SHOWN_FILES = 5
_LIST_TIMEOUT_S = 10.0  # as huggingface_hub waits for what it is told of a file
_MAX_NAME = 255  # characters, as most file systems allow


class FileMissing(CheckpointError):
    """The checkpoint is there but lacks one file."""


class HubUnreachable(FileMissing):
    """A file is not in the local cache, and the hub does not answer."""


class CheckpointFiles(Protocol):
    """Where the files of one checkpoint are found, wherever they come from."""

    @property
    def location(self) -> str:
        """As a user has named it."""

    @property
    def name(self) -> str:
        """What the swarm calls the model."""

    @property
    def gguf(self) -> str | None: ...

    @property
    def commit(self) -> str | None:
        """The revision; None: it follows from what is in the files."""

    def path(self, name: str) -> Path: ...

    def fetch_headers(self, names: Iterable[str]) -> None:
        """Have the beginnings of these files there, before their paths are asked for one after the other."""

    def fetch(self, tensors: Iterable[Any]) -> None:
        """Have the data of these tensors of the files there to be read."""


def locate(name_or_path: str, revision: str | None, token: str | None) -> Directory | HubModel:
    """The files of a directory or of a GGUF file if there is one of that name, else those of a model on the hub.

    ``owner/model/NAME.gguf`` is a file of a model on the hub.
    """
    path = Path(name_or_path).expanduser()
    try:
        check_location(name_or_path, revision)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if path.is_dir():
        return Directory(path)
    if path.is_file():
        return Directory(path.parent, path.name)
    if name_or_path.endswith(GGUF):
        owner, model, file = name_or_path.split("/", 2)
        return HubModel(f"{owner}/{model}", revision, token, file)
    return HubModel(name_or_path, revision, token)


def choose_gguf(names: Iterable[str], where: str) -> str | None:
    """The GGUF file of a model if there is one alone, or one of the best known kind.

    None: there is none, or config.json and safetensors are the model.

    Raises:
        CheckpointError: there are several, and which of them is meant cannot be guessed.
    """
    names = set(names)
    if CONFIG in names and any(name.endswith(WEIGHTS) and "/" not in name for name in names):
        return None
    found = sorted(name for name in names if name.lower().endswith(GGUF) and not _LATER_SHARD.search(name.lower()))
    found = [name for name in found if "mmproj" not in name.lower()]  # of an image encoder
    for kind in _BEST_KNOWN:
        known = [name for name in found if kind in name.lower()]
        if len(known) == 1:
            return known[0]
    if len(found) > 1:
        some = ", ".join(found[:_SHOWN_FILES]) + (", …" if len(found) > _SHOWN_FILES else "")
        raise CheckpointError(f"{where} has {len(found)} GGUF files, {some}: say which one with --gguf-file NAME")
    return found[0] if found else None


def is_plain(name: str) -> bool:
    """Whether the path can only lead to a file in the directory it is relative to, on any system."""
    parts = re.split(r"[/\\]", name)
    return len(name) <= _MAX_NAME and not any(
        part in ("", ".", "..") or ":" in part or not part.isprintable() for part in parts
    )


class Directory:
    """A directory on this machine, or one GGUF file in it.

    Attributes:
        location: the path, as it was given.
        name: its last part.
        gguf: the file that holds the model, if it is a GGUF file.
    """

    commit: str | None = None

    def __init__(self, directory: Path, gguf: str | None = None) -> None:
        self._directory, self._gguf = directory, gguf
        self.location = str(directory if gguf is None else directory / gguf)
        self.name = directory.resolve().name if gguf is None else gguf

    @cached_property
    def gguf(self) -> str | None:
        """Raises CheckpointError if there are several."""
        return self._gguf or choose_gguf((path.name for path in self._directory.iterdir()), self.location)

    def path(self, name: str) -> Path:
        """The file's path. Raises FileMissing if there is none, CheckpointError if it is a link to somewhere else."""
        path = self._directory / name
        if not path.is_file():
            raise FileMissing(f"{self._directory} has no {name}")
        self._check_link(path)
        return path

    def fetch_headers(self, names: Iterable[str]) -> None:
        """Do nothing: all are there."""

    def fetch(self, tensors: Iterable[Any]) -> None:
        """Do nothing: all are there."""

    def local(self, name: str) -> Path | None:
        """Return the file's path if there is one. Raises CheckpointError if it is a link to somewhere else."""
        try:
            return self.path(name)
        except FileMissing:
            return None

    def check_links(self) -> None:
        """Raises CheckpointError if a file is a link to somewhere else: for what others read without asking here."""
        for path in self._directory.iterdir():
            if path.is_symlink():
                self._check_link(path)

    def _check_link(self, path: Path) -> None:
        """A link in a directory of strangers may lead to a secret, which would become part of a prompt or an error.

        Weights may lie elsewhere, since only tensors are read from them. Other files may be those of another
        checkpoint, under the names that they have there, or lie in the cache of the hub.
        """
        target = path.resolve()
        if path.suffix in (WEIGHTS, GGUF) or target.is_relative_to(self._directory.resolve()):
            return
        if _is_cached(target) or (target.name == path.name and any(target.parent.glob(f"*{WEIGHTS}"))):
            return
        raise CheckpointError(
            f"{path} is a link to {target}, outside {self._directory}: expected the file itself, or a link to "
            f"{path.name} in the directory of another checkpoint, beside its weights"
        )


def _is_cached(path: Path) -> bool:
    return any(parent.name == "blobs" and parent.parent.name.startswith("models--") for parent in path.parents)


class HubModel:
    """A model on the hub, or one GGUF file of it.

    Attributes:
        location: the hub id, as it was given.
        name: the hub id, with the name of the file if it is a GGUF file.
        gguf: the name of that file.
    """

    def __init__(self, repository: str, revision: str | None, token: str | None, gguf: str | None = None) -> None:
        self.location = repository if gguf is None else f"{repository}/{gguf}"
        self._repository = repository
        self._revision = revision
        self._token = token
        self._gguf = gguf

    @cached_property
    def name(self) -> str:
        return self._repository if self.gguf is None else f"{self._repository}/{self.gguf}"

    @cached_property
    def gguf(self) -> str | None:
        """Raises CheckpointError if the model cannot be reached, or has several GGUF files and no safetensors."""
        if self._gguf is not None:
            return self._gguf
        cached = self._cached_files()
        if CONFIG in cached and any(WEIGHTS in name and "/" not in name for name in cached):
            return None  # whatever else the hub has
        found = choose_gguf(self._listed_files() or cached, self.location)
        if found is None:
            self._download(CONFIG, self._revision)
        return found

    @cached_property
    def commit(self) -> str:
        """The commit hash the requested revision stands for, fixed at the first call."""
        name = self.gguf or CONFIG
        return self._download(name, self._revision).parents[name.count("/")].name  # …/snapshots/<commit>/config.json

    @property
    def is_public(self) -> bool:
        """Whether the hub gives it to anybody, without a token or terms to accept; False if the hub does not answer."""
        try:
            info = HfApi(token=False).model_info(self._repository, revision=self._revision, timeout=_LIST_TIMEOUT_S)
        except Exception:  # as in _listed_files
            return False
        return not info.private and not info.gated

    def _listed_files(self) -> list[str]:
        """Return the names of all files on the hub; none if it cannot be reached."""
        try:
            hub = HfApi(token=self._token)
            siblings = hub.model_info(self._repository, revision=self._revision, timeout=_LIST_TIMEOUT_S).siblings
            return [sibling.rfilename for sibling in siblings or ()]
        except Exception:  # no network, no such model, or an error of whichever HTTP library huggingface_hub uses
            return []

    def _cached_files(self) -> list[str]:
        try:
            cached = Path(snapshot_download(self._repository, revision=self._revision, local_files_only=True))
        except (OSError, ValueError):
            return []
        return [str(path.relative_to(cached).as_posix()) for path in cached.rglob("*")]

    def path(self, name: str) -> Path:
        """The file's local path, downloaded if need be. Raises CheckpointError; FileMissing if only it is absent."""
        found = self._cached(name)
        if found is None:
            return self._download(name, self.commit)
        if not isinstance(found, str):
            raise FileMissing(f"{self.location} has no {name} on the hub")
        return Path(found)

    def fetch_headers(self, names: Iterable[str]) -> None:
        """Do nothing: ``path`` downloads them whole."""

    def fetch(self, tensors: Iterable[Any]) -> None:
        """Do nothing: ``path`` has downloaded their files."""

    def local(self, name: str) -> Path | None:
        """Return the file's path if it is in the local cache. A small one is downloaded: most members have those."""
        if name.endswith((WEIGHTS, GGUF)) and self._cached(name) is None:
            return None
        try:
            return self.path(name)
        except CheckpointError:
            return None

    def _cached(self, name: str) -> Any:
        """The path in the local cache, None if it is not there, or another object if the hub has no such file."""
        return try_to_load_from_cache(self._repository, name, revision=self.commit)

    def _download(self, name: str, revision: str | None) -> Path:
        model = self._repository if self._revision is None else f"{self._repository} at {self._revision}"
        try:
            return Path(hf_hub_download(self._repository, name, revision=revision, token=self._token))
        except GatedRepoError as error:
            raise CheckpointError(f"{model} is gated: accept its terms on the hub and set HF_TOKEN") from error
        except RevisionNotFoundError as error:
            raise CheckpointError(f"{self._repository} has no revision {revision!r} on the hub") from error
        except RepositoryNotFoundError as error:
            raise CheckpointError(f"{model} is neither a directory nor a model on the hub") from error
        except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
            if name == CONFIG:
                raise HubUnreachable(
                    f"{model} is neither a directory nor in the local cache, and the hub cannot be reached"
                ) from error
            raise HubUnreachable(f"{model} has no {name} in the local cache, and the hub cannot be reached") from error
        except EntryNotFoundError as error:
            raise FileMissing(f"{model} has no {name} on the hub") from error
        except OSError as error:  # includes every HTTP error of huggingface_hub
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"{name} of {model} cannot be downloaded: {reason}") from error
        except ValueError as error:  # not of the form owner/model
            raise CheckpointError(f"{model} is neither a directory nor the name of a model on the hub") from error
