"""Formulas as MathML, which browsers show by themselves: no script and no font from elsewhere.

Pages write them as GitHub reads them: $`x`$ in a line, a ``math`` fence for a line of their own.
"""

import html
import re

from latex2mathml.converter import convert


def on_page_content(content: str, **context: object) -> str:
    """Replace formulas in a page that is HTML already."""
    content = re.sub(r'<pre class="math"><code>(.*?)</code></pre>', _block, content, flags=re.DOTALL)
    return re.sub(r"\$<code>(.*?)</code>\$", lambda found: convert(html.unescape(found[1])), content, flags=re.DOTALL)


def _block(found: re.Match[str]) -> str:
    return f'<p style="overflow: auto hidden">{convert(html.unescape(found[1]), display="block")}</p>'
