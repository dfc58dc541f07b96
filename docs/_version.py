"""A hook of mkdocs: the version that the pages are about, and its licence, at the foot of each."""

from importlib.metadata import version


def on_config(config):
    """Set the footer."""
    config.copyright = f"carryclip {version('carryclip')} · Apache-2.0"
    return config
