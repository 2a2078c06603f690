"""The model that ships with the package, the default of every command, and where other models may be."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL = "tiny-python-docs"
_MODELS = Path(__file__).parents[1] / "models"


def locate(name_or_path: str) -> str:
    """The directory of a shipped model if its name was given (and no such path exists), else the argument itself."""
    shipped = _MODELS / name_or_path
    if not Path(name_or_path).exists() and name_or_path and shipped.parent == _MODELS and shipped.is_dir():
        return str(shipped)
    return name_or_path


def check_location(name_or_path: str, revision: str | None = None) -> None:
    """Raises ValueError if no model can be there: no directory, no GGUF file, and no name of either on the hub."""
    path, is_gguf = Path(name_or_path).expanduser(), name_or_path.endswith(".gguf")
    if path.is_dir() or (path.is_file() and is_gguf):
        if revision is not None:
            kind = "directory" if path.is_dir() else "file"
            raise ValueError(f"{name_or_path} is a {kind}: revision {revision!r} is for models on the hub")
    elif path.exists():
        raise ValueError(
            f"{name_or_path} is a file, expected the directory that holds config.json, or a file that ends in .gguf"
        )
    elif name_or_path.startswith(("/", "./", "../", "~")) or (name_or_path.count("/") > 1) != is_gguf:
        raise ValueError(f"{name_or_path} does not exist")


def with_gguf_file(name_or_path: str, gguf_file: str | None) -> str:
    """The GGUF file of this name in a directory, or of a model on the hub."""
    return name_or_path if gguf_file is None else f"{name_or_path.rstrip('/')}/{gguf_file}"
