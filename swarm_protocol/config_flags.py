"""Flags that set the fields of a configuration class, and take their types and defaults from it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True)
class Flag:
    """A flag that sets one field.

    Attributes:
        field: the field's name. The flag is called like the field, without the unit ``_s``, unless it has a ``name``.
        kind: the type of the typed word; by default the field's type, or text if there is a ``read``.
        default: the flag's default where it is not the field's, such as ``2GiB`` for a number of bytes.
        read: converts the typed word to the field's value once all flags are parsed. It raises ValueError with a
            sentence, which argparse would replace by one of its own.
        off: a value, and the help text of ``--no-NAME``, which sets this value.
    """

    field: str
    help: str | None = None
    _: KW_ONLY
    name: str = ""
    metavar: str | None = None
    kind: Callable[[str], Any] | None = None
    default: Any = None
    read: Callable[[Any], Any] | None = None
    off: tuple[str, str] | None = None

    @property
    def typed_name(self) -> str:
        """Return the flag without its dashes."""
        return self.name or self.field.removesuffix("_s").replace("_", "-")

    @property
    def dest(self) -> str:
        """Return the attribute of the parsed arguments."""
        return self.typed_name.replace("-", "_")

    def value(self, args: argparse.Namespace) -> Any:
        """Return the field's value. Raise ValueError if ``read`` does."""
        typed = getattr(args, self.dest)
        if isinstance(typed, list):  # argparse makes lists, and configurations are frozen
            return tuple(typed)
        return typed if typed is None or self.read is None else self.read(typed)


class ConfigFlags:
    """Flags of a command that set fields of one configuration class."""

    def __init__(self, config_class: type[Any], *flags: Flag) -> None:
        self._class, self._flags = config_class, flags

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags, in their order. A field without a default has a required flag, a bool's flag turns it on."""
        hints = get_type_hints(self._class)
        for flag in self._flags:
            if hints[flag.field] is bool:
                parser.add_argument(f"--{flag.typed_name}", action="store_true", help=flag.help)
                continue
            default = getattr(self._class, flag.field, None) if flag.default is None else flag.default
            kind: Any = flag.kind or (_kind(hints[flag.field]) if flag.read is None else None)
            parser.add_argument(
                f"--{flag.typed_name}",
                type=kind,
                nargs="+" if isinstance(default, tuple) else None,
                default=list(default) if isinstance(default, tuple) else default,
                required=not hasattr(self._class, flag.field),
                metavar=flag.metavar,
                help=flag.help,
            )
            if flag.off is not None:
                const, text = flag.off
                parser.add_argument(
                    f"--no-{flag.typed_name}",
                    action="store_const",
                    dest=flag.dest,
                    const=const,
                    default=argparse.SUPPRESS,  # the default is that of the flag itself
                    help=text,
                )

    def values(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the values of the fields. Raise ValueError if a flag cannot be read."""
        return {flag.field: flag.value(args) for flag in self._flags}


def _kind(hint: Any) -> Callable[[str], Any] | None:
    """Return the type of one typed word for a field with this annotation; None: text, as argparse means it."""
    return next((kind for kind in (int, float, Path) if kind in (hint, *get_args(hint))), None)
