"""Docstrings as the pages need them: doctests as code, and the stars of formulas as stars."""

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Fences doctests and escapes stars, without a change to what a reader of the source sees."""

    def on_instance(self, *, obj: griffe.Object, **context: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """A docstring with its doctests in fences."""
    blocks = re.split(r"\n\n", text)
    return "\n\n".join(_fenced(block) if block.lstrip().startswith(">>> ") else _plain(block) for block in blocks)


def _fenced(block: str) -> str:
    indent = block[: len(block) - len(block.lstrip(" \n"))]
    return f"{indent}```pycon\n{block}\n{indent}```"


def _plain(block: str) -> str:
    if "```" in block or block.startswith("    "):
        return block
    return re.sub(r"(``.*?``|`.*?`)|(?<!\*)\*(?!\*)", lambda found: found[1] or r"\*", block)
