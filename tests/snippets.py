"""The Python on pages of the documentation, as it stands there: also in tabs, which indent it."""

import re
import textwrap
from pathlib import Path


def snippets(page: Path) -> list[str]:
    """All blocks of a page, in their order."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]
