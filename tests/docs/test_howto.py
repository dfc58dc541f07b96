"""Each snippet of the how-to pages is a whole script: it runs by itself, with nothing at hand but what it imports."""

import json
import re
import warnings
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

from carryclip.optax import Component, Norm, graft, uclip
from snippets import snippets

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "howto").glob("*.md"))
SNIPPETS = [
    pytest.param(block, id=f"{page.stem}-{number}") for page in PAGES for number, block in enumerate(snippets(page))
]


def test_the_pages_have_snippets():
    assert len(PAGES) == 6
    assert len(SNIPPETS) == 14


@pytest.mark.parametrize("block", SNIPPETS)
def test_snippets_run_by_themselves(block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what they save
    with warnings.catch_warnings():
        # TensorBoard, protobuf and orbax have deprecations of their own; ours must stay silent.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        exec(compile(block, "snippet", "exec"), {"__name__": "__main__"})
    for wanted, printed in zip(comments(block), capsys.readouterr().out.splitlines(), strict=False):
        assert float(printed) == pytest.approx(wanted, rel=0.02)


def comments(block):
    """The numbers that a page says are printed."""
    return [float(x) for x in re.findall(r"^print\(.*\)\s+# (?:about )?([\d.]+)$", block, re.MULTILINE)]


def test_the_numbers_that_pages_promise_are_compared():
    promised = [number for snippet in SNIPPETS for number in comments(snippet.values[0])]
    assert promised == [0.25, 0.0, 0.43]


def test_graft_brings_an_injected_radius_along():
    """As docs/howto/change-the-radius.md says; a plain chain does not fit such a state."""
    params = {"w": jnp.zeros(4)}

    def make(region, radius):
        return optax.chain(optax.inject_hyperparams(lambda radius: uclip(region(radius)))(radius=radius))

    old, new = make(Norm, 1.0).init(params), make(Component, 0.1)
    state = graft(new.init(params), old)
    assert float(state[0].hyperparams["radius"]) == 1.0
    state[0].hyperparams["radius"] = jnp.asarray(0.1)
    updates, _ = new.update({"w": jnp.full(4, 3.0)}, state, params)
    assert float(updates["w"][0]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="must come from the same optimizer"):
        graft(uclip(Component(0.1)).init(params), old)


@pytest.mark.parametrize("page", [*PAGES, *(DOCS / name for name in ("faq.md", "glossary.md", "gallery.md"))], ids=str)
def test_links_lead_to_pages_and_to_headings(page):
    for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if heading:
            found = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in found}
            assert heading in anchors, f"{page.name} links to {target}#{heading}"


def test_the_glossary_is_sorted_and_has_our_words():
    words = re.findall(r"^\*\*(.*?)\.\*\*", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert words == sorted(words, key=str.lower)
    assert {"Carry", "Radius", "Delay", "Region", "Policy", "Radii, as a unit"} <= set(words)


def test_the_faq_says_what_the_cost_table_has():
    """By two to three times: the figures of the default carry and of the full one under a norm."""
    speed = (DOCS.parent / "README.md").read_text(encoding="utf-8") + (DOCS / "speed.md").read_text(encoding="utf-8")
    ratios = [float(x) for x in re.findall(r"^\| eager Norm(?:, Shrunk)? \| [\d.]+ \| ([\d.]+)", speed, re.MULTILINE)]
    assert ratios
    assert all(1.5 < ratio < 3.5 for ratio in ratios)


def test_readme_and_faq_say_what_whole_training_steps_cost():
    rows = json.loads((DOCS.parent / "benchmarks" / "results.json").read_text(encoding="utf-8"))["rows"]
    ours = ("U-Clip Norm", "U-Clip Component")
    cost = [100 * (row["ratio"] - 1) for row in rows if row["part"] == "end to end" and row["name"] in ours]
    said = f"{min(cost):.0f} to {max(cost):.0f} %"
    for page in (DOCS.parent / "README.md", DOCS / "faq.md"):
        assert said in page.read_text(encoding="utf-8"), page.name


def test_pages_say_how_long_the_example_of_a_task_is():
    count = len((DOCS.parent / "examples" / "own_task" / "diabetes.py").read_text(encoding="utf-8").splitlines())
    assert f"a task in {count} lines" in (DOCS / "gallery.md").read_text(encoding="utf-8")
    assert f"is one of {count} lines" in (DOCS / "experiments" / "index.md").read_text(encoding="utf-8")
