"""The gallery has every example, and shows what they print and draw."""

import re
import sys
import warnings
from pathlib import Path

import gallery
import matplotlib.pyplot as plt
import pytest

from carryclip import CarryClipWarning

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")


def test_every_example_is_in_the_gallery():
    for path in (ROOT / "examples").iterdir():
        if not path.name.startswith(("_", ".")):
            assert f"examples/{path.name}" in TEXT, f"{path.name} is missing from docs/gallery.md"


def test_the_gallery_names_no_example_that_is_gone():
    for name in re.findall(r"examples/([\w.-]+)", TEXT):
        assert (ROOT / "examples" / name).exists(), name


PACKAGES = {"sklearn": "scikit-learn", "stable_baselines3": "stable-baselines3", "numpy": "NumPy"}
BROUGHT = {
    "torch": {"NumPy"},
    "transformers": {"torch"},
    "lightning": {"torch"},
    "jax": {"NumPy"},
    "gymnasium": {"NumPy"},
}
"""What a package, or carryclip itself, brings along."""


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_import_no_more_than_the_gallery_says(path):
    (stated,) = re.findall(rf"examples/{path.name}` \((.*?)\)", TEXT)
    packages = set(re.findall(r"`([\w-]+)`", stated)) | {"NumPy"}
    packages |= {each for package in packages for each in BROUGHT.get(package, ())}
    found = {
        name.partition(".")[0] for name in re.findall(r"^(?:import|from) ([\w.]+)", path.read_text(), re.MULTILINE)
    }
    for name in found - set(sys.stdlib_module_names) - {"carryclip"}:
        assert PACKAGES.get(name, name) in packages, f"{path.name} imports {name}; the gallery says {stated}"


@pytest.mark.parametrize("name", ["one_line.py", "which_radius.py"])
def test_outputs_are_what_the_examples_print(name):
    assert gallery.without_numbers(gallery.shown_on_page()[name]) == gallery.without_numbers(gallery.printed(name))


def test_every_picture_of_the_page_has_its_command():
    shown = set(re.findall(r"figures/([\w-]+)\.svg", TEXT))
    assert shown == set(gallery.PICTURES)
    assert all((ROOT / "docs" / "figures" / f"{name}.svg").exists() for name in shown)


def test_the_picture_of_dangers_shows_them(monkeypatch):
    """Some of the policies; bias over few steps."""
    some = ("clip (carry=False)", "full (carry=True)", "Shrunk()")
    monkeypatch.setattr(gallery, "COLOURS", {name: gallery.COLOURS[name] for name in some})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryClipWarning)
        figure = gallery.dangers(steps=2200, noisy=200)
    left, middle, right = figure.axes
    lowest = {line.get_label(): min(line.get_ydata()) for line in left.get_lines() if len(line.get_ydata()) > 2}
    assert set(lowest) == set(gallery.COLOURS)
    assert lowest["full (carry=True)"] < -90
    assert lowest["Shrunk()"] > -1
    assert lowest["clip (carry=False)"] > -1
    assert min(min(line.get_ydata()) for line in middle.get_lines()) < -40
    assert len(right.patches) == len(gallery.COLOURS)
    plt.close(figure)


def test_the_picture_of_radii_has_carries_within_their_bounds():
    figure = gallery.which_radius(seeds=50)
    left, right = figure.axes
    mean, bound = (line.get_ydata() for line in left.get_lines()[:2])
    assert (mean <= bound).all()
    lost = right.get_lines()[0].get_ydata()
    assert lost[0] > 50
    assert lost[-1] < 10
    plt.close(figure)
