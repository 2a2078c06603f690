"""Where a checkpoint's files come from: a directory, or the hub and its local cache."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path

from huggingface_hub import hf_hub_download
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
WEIGHTS = ".safetensors"
_MAX_NAME = 255  # characters, as most file systems allow


class FileMissing(CheckpointError):
    """The checkpoint is there but lacks one file."""


def locate(name_or_path: str, revision: str | None, token: str | None) -> Directory | HubModel:
    """The files of a directory if there is one of that name, else those of a model on the hub."""
    directory = Path(name_or_path).expanduser()
    try:
        check_location(name_or_path, revision)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return Directory(directory) if directory.is_dir() else HubModel(name_or_path, revision, token)


def is_plain(name: str) -> bool:
    """Whether the path can only lead to a file in the directory it is relative to, on any system."""
    parts = re.split(r"[/\\]", name)
    return len(name) <= _MAX_NAME and not any(
        part in ("", ".", "..") or ":" in part or not part.isprintable() for part in parts
    )


class Directory:
    def __init__(self, directory: Path) -> None:
        self.location = str(directory)
        self.name = directory.resolve().name

    def path(self, name: str) -> Path:
        """The file's path. Raises FileMissing if there is none, CheckpointError if it is a link to somewhere else."""
        path = Path(self.location) / name
        if not path.is_file():
            raise FileMissing(f"{self.location} has no {name}")
        self._check_link(path)
        return path

    def check_links(self) -> None:
        """Raises CheckpointError if a file is a link to somewhere else: for what others read without asking here."""
        for path in Path(self.location).iterdir():
            if path.is_symlink():
                self._check_link(path)

    def _check_link(self, path: Path) -> None:
        """A link in a directory of strangers may lead to a secret, which would become part of a prompt or an error.

        Weights may lie elsewhere, since only tensors are read from them. Other files may be those of another
        checkpoint, under the names that they have there, or lie in the cache of the hub.
        """
        target = path.resolve()
        if path.suffix == WEIGHTS or target.is_relative_to(Path(self.location).resolve()):
            return
        if _is_cached(target) or (target.name == path.name and any(target.parent.glob(f"*{WEIGHTS}"))):
            return
        raise CheckpointError(
            f"{path} is a link to {target}, outside {self.location}: expected the file itself, or a link to "
            f"{path.name} in the directory of another checkpoint, beside its weights"
        )


def _is_cached(path: Path) -> bool:
    return any(parent.name == "blobs" and parent.parent.name.startswith("models--") for parent in path.parents)


class HubModel:
    def __init__(self, repository: str, revision: str | None, token: str | None) -> None:
        self.location = self.name = repository
        self._revision = revision
        self._token = token

    @cached_property
    def commit(self) -> str:
        """The commit hash the requested revision stands for, fixed at the first call."""
        return self._download(CONFIG, self._revision).parent.name  # …/snapshots/<commit>/config.json

    def path(self, name: str) -> Path:
        """The file's local path, downloaded if need be. Raises CheckpointError; FileMissing if only it is absent."""
        return self._download(name, self.commit)

    def _download(self, name: str, revision: str | None) -> Path:
        model = self.location if self._revision is None else f"{self.location} at {self._revision}"
        try:
            return Path(hf_hub_download(self.location, name, revision=revision, token=self._token))
        except GatedRepoError as error:
            raise CheckpointError(f"{model} is gated: accept its terms on the hub and set HF_TOKEN") from error
        except RevisionNotFoundError as error:
            raise CheckpointError(f"{self.location} has no revision {revision!r} on the hub") from error
        except RepositoryNotFoundError as error:
            raise CheckpointError(f"{model} is neither a directory nor a model on the hub") from error
        except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
            if name == CONFIG:
                raise CheckpointError(
                    f"{model} is neither a directory nor in the local cache, and the hub cannot be reached"
                ) from error
            raise FileMissing(f"{model} has no {name} in the local cache, and the hub cannot be reached") from error
        except EntryNotFoundError as error:
            raise FileMissing(f"{model} has no {name} on the hub") from error
        except OSError as error:  # includes every HTTP error of huggingface_hub
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"{name} of {model} cannot be downloaded: {reason}") from error
        except ValueError as error:  # not of the form owner/model
            raise CheckpointError(f"{model} is neither a directory nor the name of a model on the hub") from error
