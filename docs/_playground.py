"""A hook of mkdocs: puts the playground, made from the package, beside the page about it."""

from mkdocs.structure.files import File

from carryclip import playground


def on_files(files, config):
    """Add ``playground/page.html`` to the site."""
    files.append(File.generated(config, "playground/page.html", content=playground.page()))
    return files
