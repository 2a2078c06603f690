"""An extension of Griffe: the comment behind a dataclass's field is the field's docstring, unless it has another."""

from __future__ import annotations

import io
import tokenize

from griffe import Class, Docstring, Extension


class FieldComments(Extension):
    def on_class(self, *, cls: Class, **_kwargs: object) -> None:
        if not any("dataclass" in label for label in cls.labels) and not cls.decorators:
            return
        for field in cls.members.values():
            if field.is_attribute and not field.docstring and field.lineno:
                comment = _comment(cls.lines_collection[cls.filepath][field.lineno - 1])
                if comment:
                    field.docstring = Docstring(comment, lineno=field.lineno, parent=field)


def _comment(line: str) -> str:
    """What stands behind the ``#`` of one line of source."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip()).readline))
    except tokenize.TokenError:
        return ""
    return next((token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT), "")
