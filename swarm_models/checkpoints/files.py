"""The sources of a checkpoint's files: a directory, or the hub and its local cache."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import HfApi, ModelInfo, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of whichever library it uses
    EntryNotFoundError,
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from swarm_models.checkpoints.default_model import check_location
from swarm_protocol.errors import CheckpointError
from swarm_protocol.failures import first_line

CONFIG = "config.json"
WEIGHTS, GGUF = ".safetensors", ".gguf"
_BEST_KNOWN = ("q4_k_m", "q8_0")  # if a model has several GGUF files: the kinds that most people use
_LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_SHOWN_FILES = 5
_LIST_TIMEOUT_S = 10.0  # the same timeout that huggingface_hub uses for a file's metadata
_MAX_NAME = 255  # characters: the limit of most file systems
_NO_ANSWER = (  # errors that mean that the hub does not answer; its files may be in the local cache all the same
    *(HTTPError, OSError),
    getattr(sys.modules[HTTPError.__module__], "InvalidURL", HTTPError),  # a wrong address; in httpx, no HTTPError
    *(ImportError, RuntimeError),  # a package for the proxy is missing, or the HTTP client is closed
    *(ValueError, LookupError, TypeError, AttributeError),  # an odd reply
)


class FileMissing(CheckpointError):
    """The checkpoint exists but lacks one file."""


class HubUnreachable(FileMissing):
    """A file is not in the local cache, and the hub does not answer."""


class CheckpointFiles(Protocol):
    """The source of one checkpoint's files, wherever they are stored."""

    @property
    def location(self) -> str:
        """Return the location as the user gave it."""

    @property
    def name(self) -> str:
        """Return the swarm's name for the model."""

    @property
    def gguf(self) -> str | None: ...

    @property
    def commit(self) -> str | None:
        """Return the revision, or None if it is computed from the content of the files."""

    def path(self, name: str) -> Path: ...

    def fetch_headers(self, names: Iterable[str]) -> None:
        """Fetch the headers of these files together, before their paths are requested one by one."""

    def fetch(self, tensors: Iterable[Any]) -> None:
        """Fetch the data of these tensors, so that they can be read from the files."""


def locate(name_or_path: str, revision: str | None, token: str | None) -> LocalFiles | HubModel:
    """Return the files of the directory or GGUF file of that name if it exists, else those of a model on the hub.

    ``owner/model/NAME.gguf`` names a file of a model on the hub.
    """
    path = Path(name_or_path).expanduser()
    try:
        check_location(name_or_path, revision)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if path.is_dir():
        return LocalFiles(path)
    if path.is_file():
        return LocalFiles(path.parent, path.name)
    if name_or_path.endswith(GGUF):
        owner, model, file = name_or_path.split("/", 2)
        return HubModel(f"{owner}/{model}", revision, token, file)
    return HubModel(name_or_path, revision, token)


def choose_gguf(names: Iterable[str], where: str) -> str | None:
    """Return the model's only GGUF file, or its only one of the best-known kind.

    Return None if there is none, or if the model consists of config.json and safetensors.

    Raises:
        CheckpointError: there are several, and the choice is ambiguous.
    """
    names = set(names)
    if CONFIG in names and any(name.endswith(WEIGHTS) and "/" not in name for name in names):
        return None
    found = sorted(filter(_may_be_model, names))
    for kind in _BEST_KNOWN:
        known = [name for name in found if kind in name.lower()]
        if len(known) == 1:
            return known[0]
    if len(found) > 1:
        some = ", ".join(found[:_SHOWN_FILES]) + (", …" if len(found) > _SHOWN_FILES else "")
        raise CheckpointError(f"{where} has {len(found)} GGUF files, {some}: say which one with --gguf-file NAME")
    return found[0] if found else None


def _may_be_model(name: str) -> bool:
    """Return whether the file may be a whole GGUF model or its first shard, but no image encoder (``mmproj``)."""
    name = name.lower()
    return name.endswith(GGUF) and not _LATER_SHARD.search(name) and "mmproj" not in name


def is_plain(name: str) -> bool:
    """Return whether the relative path is certain to lead to a file inside its base directory, on any system."""
    parts = re.split(r"[/\\]", name)
    return len(name) <= _MAX_NAME and not any(
        part in ("", ".", "..") or ":" in part or not part.isprintable() for part in parts
    )


class LocalFiles:
    """The files of a checkpoint in a local directory, or one GGUF file in it.

    Attributes:
        location: the path, as the user gave it.
        gguf: the name of the GGUF file that holds the model, if it is one.
    """

    commit: str | None = None

    def __init__(self, directory: Path, gguf: str | None = None) -> None:
        self._directory, self._gguf = directory, gguf
        self.location = str(directory if gguf is None else directory / gguf)
        self.name = directory.resolve().name if gguf is None else gguf

    @cached_property
    def gguf(self) -> str | None:
        """Return the name of the GGUF file, or None; raise CheckpointError if there are several."""
        return self._gguf or choose_gguf((path.name for path in self._directory.iterdir()), self.location)

    def path(self, name: str) -> Path:
        """Return the file's path; raise FileMissing if there is none, CheckpointError if it links outside."""
        path = self._directory / name
        if not path.is_file():
            raise FileMissing(f"{self._directory} has no {name}")
        self._check_link(path)
        return path

    def fetch_headers(self, names: Iterable[str]) -> None:
        """Do nothing: all files are local."""

    def fetch(self, tensors: Iterable[Any]) -> None:
        """Do nothing: all files are local."""

    def local(self, name: str) -> Path | None:
        """Return the file's path, or None if it is absent; raise CheckpointError if it links outside the directory."""
        try:
            return self.path(name)
        except FileMissing:
            return None

    def check_links(self) -> None:
        """Raise CheckpointError if a file links outside the directory: other code may read it without ``path``."""
        for path in self._directory.iterdir():
            if path.is_symlink():
                self._check_link(path)

    def _check_link(self, path: Path) -> None:
        """Refuse links that may lead to a secret, which would then become part of a prompt or an error.

        Weights may lie elsewhere, since only tensors are read from them. Another file may lie in the cache of the hub,
        or beside the weights of another checkpoint if it has the same name there.
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
    """The files of a model on the hub, or one GGUF file of it.

    Attributes:
        location: the hub id, as the user gave it, with the name of the file if the user gave one.
        name: the hub id, with the name of the file if it is a GGUF file.
        gguf: the name of the GGUF file, if the model is one.
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
        """Return the GGUF file's name or None; raise CheckpointError if it is unreachable or ambiguous."""
        if self._gguf is not None:
            return self._gguf
        cached = self._cached_files()
        if CONFIG in cached and any(WEIGHTS in name and "/" not in name for name in cached):  # an index of shards, too
            return None  # no matter which other files the hub has
        found = choose_gguf(self._listed_files() or cached, self.location)
        if found is None:
            self._download(CONFIG, self._revision)  # raises the reason if there is no model at all
        return found

    @cached_property
    def commit(self) -> str:
        """Return the commit hash of the requested revision, fixed at the first call."""
        name = self.gguf or CONFIG
        return self._download(name, self._revision).parents[name.count("/")].name  # …/snapshots/<commit>/config.json

    @property
    def is_public(self) -> bool:
        """Return whether anybody can download the model without a token or terms; False if the hub does not answer."""
        info = self._model_info(token=False)
        return info is not None and not info.private and not info.gated

    def _listed_files(self) -> list[str]:
        """Return the names of all files on the hub; an empty list if it cannot be reached."""
        info = self._model_info(self._token)
        return [sibling.rfilename for sibling in info.siblings or ()] if info is not None else []

    def _model_info(self, token: str | bool | None) -> ModelInfo | None:
        """Return the hub's description of the repository; None if the hub cannot be reached, or has no such model."""
        try:
            return HfApi(token=token).model_info(self._repository, revision=self._revision, timeout=_LIST_TIMEOUT_S)
        except _NO_ANSWER:
            return None

    def _cached_files(self) -> list[str]:
        try:
            cached = Path(snapshot_download(self._repository, revision=self._revision, local_files_only=True))
        except (OSError, ValueError):
            return []
        return [path.relative_to(cached).as_posix() for path in cached.rglob("*")]

    def path(self, name: str) -> Path:
        """Return the file's path, downloaded if needed; raise FileMissing if only this file is absent."""
        found = self._cached(name)
        if found is None:
            return self._download(name, self.commit)
        if not isinstance(found, str):
            raise FileMissing(f"{self.location} has no {name} on the hub")
        return Path(found)

    def fetch_headers(self, names: Iterable[str]) -> None:
        """Do nothing: ``path`` downloads whole files."""

    def fetch(self, tensors: Iterable[Any]) -> None:
        """Do nothing: ``path`` has downloaded the files."""

    def local(self, name: str) -> Path | None:
        """Return the file's path if it is cached; download only a small file, because most members have those."""
        if name.endswith((WEIGHTS, GGUF)) and self._cached(name) is None:
            return None
        try:
            return self.path(name)
        except CheckpointError:
            return None

    def _cached(self, name: str) -> Any:
        """Return the path in the local cache, None if it is absent, or another object if the hub has no such file."""
        return try_to_load_from_cache(self._repository, name, revision=self.commit)

    def _download(self, name: str, revision: str | None) -> Path:
        model = self._repository if self._revision is None else f"{self._repository} at {self._revision}"
        try:  # subclasses are caught first: a gated repository is one that is not found, a local entry is an entry
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
            raise CheckpointError(f"{name} of {model} cannot be downloaded: {first_line(error)}") from error
        except ValueError as error:  # the name is not of the form owner/model
            raise CheckpointError(f"{model} is neither a directory nor the name of a model on the hub") from error
