"""The playground: one HTML page that works offline, with sliders for radius, noise, learning rate and policy.

Its algorithm is ``carryclip.reference`` written once more in JavaScript; tests compare the two in a browser. The parts
lie beside this file and are put into one page here, so that it can be mailed, opened from a disk or served.
"""

import tempfile
import webbrowser
from importlib.resources import files
from pathlib import Path

from carryclip import __version__

SCRIPTS = ("policies.js", "problems.js", "simulate.js", "words.js", "pictures.js", "app.js")
"""In the order in which they need each other."""


def page() -> str:
    """The whole page, with styles and scripts inside.

    >>> "<link" in page() or "src=" in page()
    False
    """
    parts = files(__name__)

    def read(name: str) -> str:
        return parts.joinpath(name).read_text(encoding="utf-8")

    scripts = '"use strict";\n' + "\n".join(map(read, SCRIPTS))
    text = read("index.html").replace("VERSION", __version__)
    text = text.replace("/* style.css */", read("style.css"))
    return text.replace("/* scripts */", scripts)


def write(path: str | Path) -> Path:
    """Write the page to ``path`` and return where it is.

    Args:
        path: a file, or a folder that exists, in which the file will be ``playground.html``.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder).name
    'playground.html'
    """
    target = Path(path)
    if target.is_dir():
        target = target / "playground.html"
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {target.parent} to write the playground to: make it first.")
    target.write_text(page(), encoding="utf-8")
    return target


def open_in_browser(path: str | Path | None = None) -> Path:
    """Write the page, to a temporary folder unless ``path`` is given, and open it in the browser."""
    target = write(tempfile.mkdtemp(prefix="carryclip-") if path is None else path).resolve()
    webbrowser.open(target.as_uri())
    return target


def main(out: str | None = None, *, show: bool = True) -> int:
    """What ``carryclip playground`` does: write the page, open it, and say where it is.

    Args:
        out: file or folder for the page; a temporary folder by default.
        show: False only writes it.
    """
    try:
        target = open_in_browser(out) if show else write(out or Path.cwd()).resolve()
    except OSError as error:
        print(f"The playground could not be written: {error}")
        return 2
    print(f"Open {target}")
    return 0
