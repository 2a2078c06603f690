"""Comparison of the installed package versions with the versions that this package was tested with."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

DISTRIBUTION = "swarm-lm"


def required_packages() -> list[str]:
    """Return the requirements of the installed package, as its metadata lists them.

    Raises:
        PackageNotFoundError: only the source is present.
    """
    return metadata.requires(DISTRIBUTION) or []


def installed_versions(required: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return the installed versions by name, and one sentence for each requirement that they do not meet."""
    from packaging.requirements import Requirement

    wrong: list[str] = []
    versions: dict[str, str] = {}
    for requirement in map(Requirement, required):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = versions[requirement.name] = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, expected {requirement.specifier}")
    return versions, wrong


def untested_transformers() -> str | None:
    """Return a sentence if the installed transformers is outside the range that was tested, else None."""
    try:
        required = required_packages()
    except metadata.PackageNotFoundError:
        return None
    _, wrong = installed_versions(line for line in required if line.startswith("transformers"))
    return f"this version of transformers was not tested with {DISTRIBUTION}: {wrong[0]}" if wrong else None
