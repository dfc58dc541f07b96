"""The gallery of examples: draws its pictures, and puts what short examples print into docs/gallery.md.

    python benchmarks/gallery.py            # pictures and outputs, two or three minutes
    python benchmarks/gallery.py --check    # says whether the page shows what the examples print now

Numbers come from the examples' own functions, so that picture and example cannot differ.
"""

import argparse
import functools
import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
import numpy as np

from carryclip import CarryClipWarning, Component
from carryclip.theory import bounds, problems, simulate

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
PAGE, FIGURES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "figures"
STYLE = {
    "svg.hashsalt": "carryclip",  # the same file from the same numbers
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "legend.frameon": False,
}
COLOURS = {
    "clip (carry=False)": "C1",
    "full (carry=True)": "C3",
    "Capped(10)": "C4",
    "Gated()": "C2",
    "Drip()": "C9",
    "Shrunk()": "C0",
}


def example(name: str) -> ModuleType:
    """An example as a module; nothing of it runs."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dangers(steps: int = 3000, noisy: int = 4000) -> plt.Figure:
    """Wind-up, a spike and bias, as examples/dangers.py has them; bias over so many steps."""
    shown = example("dangers")
    still, spike = np.zeros((steps, 1)), np.zeros((steps, 1))
    spike[10] = 1e4
    skewed = np.random.default_rng(0).lognormal(0, 1.5, (noisy, 500)) - np.exp(1.5**2 / 2)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    for name, colour in COLOURS.items():
        carry = shown.POLICIES[name]
        wide = 2.5 if name == "Shrunk()" else 1.5
        left.plot(shown.descend(carry, 100, still, steps)[:, 0], colour, label=name, linewidth=wide)
        middle.plot(shown.descend(carry, 0, spike, steps)[:, 0], colour, linewidth=wide)
        bias = shown.descend(carry, 0, skewed, noisy)[noisy // 2 :].mean()
        right.barh(name, abs(bias), color=colour)
        right.annotate(f"{abs(bias):.2f}", (abs(bias), name), xytext=(4, 0), textcoords="offset points", va="center")
    left.set(title="From x = 100: wind-up", xlabel="step", ylabel="x (optimum 0)")
    middle.set(title="After one gradient of 10,000 radii", xlabel="step")
    right.set(title="Under skewed noise: bias", xlabel="distance of the mean x from 0", xlim=(0, 2.2))
    right.invert_yaxis()
    for axes in (left, middle):
        axes.axhline(0, color="0.6", linewidth=0.8, linestyle=":")
    left.legend(fontsize="small", ncols=1)
    return figure


def which_radius(seeds: int = 1000) -> plt.Figure:
    """Carry and what plain clipping loses, by radius, as examples/which_radius.py has them."""
    shown = example("which_radius")
    radii = np.geomspace(0.36, 3.9, 16)
    given = {"noise": shown.LAW, "lr": 1.0, "steps": 3000, "seeds": seeds, "times": [3000]}
    carried = simulate.run(problems.Linear(shown.MEAN), Component(radii), carry=True, **given)
    plain = simulate.run(problems.Linear(shown.MEAN), Component(radii), carry=False, **given)
    rate = bounds.lundberg_rate(alpha=radii - shown.MEAN, noise=shown.LAW)
    lost = (shown.MEAN + plain.mean_position[-1, :, 0] / 3000) / shown.MEAN
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    left.plot(radii, carried.carry[-1].mean(-1), "C0o-", markersize=4, label="mean carry")
    left.plot(radii, [bounds.lundberg_mean(rate=each) for each in rate], "C0--", label="its bound")
    left.plot(radii, carried.quantile(0.99), "C2o-", markersize=4, label="99 % of carries are below")
    left.plot(radii, [bounds.lundberg_quantile(0.01, rate=each) for each in rate], "C2--", label="its bound")
    left.set(title="carry=True: how much waits", yscale="log", ylabel="carry")
    left.legend(fontsize="small")
    right.plot(radii, 100 * lost, "C1o-", markersize=4)
    right.set(title="carry=False: what is lost", ylabel="% of the mean gradient", ylim=(0, None))
    for axes in (left, right):
        axes.axvline(shown.MEAN, color="0.6", linewidth=0.8, linestyle=":")
        axes.set(xlabel="radius (dotted: the mean gradient, 0.3)", xlim=(0.2, 4.0))
    return figure


PICTURES = {"gallery-dangers": dangers, "gallery-which-radius": which_radius}


@functools.cache
def printed(name: str) -> str:
    """What an example prints."""
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"examples/{name} ends with {done.returncode}:\n{done.stderr}")
    return done.stdout.rstrip()


BLOCK = re.compile(r"(<!-- prints: (\S+) -->\n```text\n)(.*?)(\n```\n)", re.DOTALL)


def shown_on_page() -> dict[str, str]:
    """What the page says that examples print."""
    return {name: text for _, name, text, _ in BLOCK.findall(PAGE.read_text(encoding="utf-8"))}


def without_numbers(text: str) -> list[str]:
    """The words alone: last digits differ from machine to machine."""
    return re.sub(r"[\d.,%]+", "#", text).split()


def check() -> int:
    """Compare the page with what the examples print now."""
    old = [name for name, text in shown_on_page().items() if without_numbers(text) != without_numbers(printed(name))]
    print(f"Old: {', '.join(old)}. Run: python benchmarks/gallery.py" if old else "docs/gallery.md is current.")
    return 1 if old else 0


def main() -> int:
    """Draw and write, or check."""
    parser = argparse.ArgumentParser(description="The gallery of examples.")
    parser.add_argument("--check", action="store_true", help="only compare the page with the examples")
    if parser.parse_args().check:
        return check()
    warnings.simplefilter("ignore", CarryClipWarning)  # the dangers are meant
    with mpl.rc_context(STYLE):
        for name, draw in PICTURES.items():
            draw().savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda found: found[1] + printed(found[2]) + found[4], page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
