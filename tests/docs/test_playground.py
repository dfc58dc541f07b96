"""The playground in a real browser: its numbers are the reference's, and it is usable by keyboard and on a phone."""

import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from carryclip import Capped, CarryClipWarning, Drip, Gated, Norm, Shrunk, playground
from carryclip.reference import UClip as Reference
from carryclip.theory.problems import Aliasing, TwoQuadratics
from carryclip.torch import UClip

POLICIES = {
    "plain": False,
    "full": True,
    "gated": Gated(),
    "capped": Capped(10),
    "drip": Drip(),
    "shrunk": Shrunk(),
}
STEPS = 400


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return playground.write(tmp_path_factory.mktemp("playground"))


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser, place):
    """Open the page; at the end nothing may have been asked of anyone, nor complained about."""
    contexts, asked, said = [], [], []

    def open_page(settings="", **given):
        context = browser.new_context(**given)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(place.as_uri() + settings)
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [url for url in asked if not url.startswith(place.as_uri())] == []
    assert said == []


def settled(page):
    """Wait until everything shows the present address."""
    page.wait_for_selector(f'body[data-ready="{page.evaluate("location.hash")}"]')


# ---------------------------------------------------------------------- the numbers


@pytest.fixture(scope="module")
def functions(browser, place):
    """One page whose functions are called."""
    page = browser.new_page()
    page.goto(place.as_uri())
    yield page
    page.close()


def gradients():
    """Noise, a mean above the radius, a spike, silence, and skewed noise, in three dimensions."""
    rng = np.random.default_rng(0)
    g = rng.normal(0, 1, (STEPS, 3))
    g[50:150] += [2.0, 1.0, 0.0]
    g[150:230] -= [2.5, 0.0, 0.5]
    g[230] *= 1e4
    g[240:245] = 0.0
    g[250:] += (rng.random((STEPS - 250, 1)) < 0.05) * np.array([40.0, -10.0, 3.0])
    return g


PLAY = """([name, radius, gradients]) => {
  const clipper = new Clipper(name, radius);
  return gradients.map((g) => ({update: clipper.step(g), carry: clipper.carry, delay: clipper.delay}));
}"""


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("radius", [0.3, 2.0])
def test_updates_and_carry_are_those_of_the_reference(functions, name, radius):
    judge = Reference(Norm(radius), carry=POLICIES[name])
    expected, carries = [], []
    for g in gradients():
        expected.append(judge.step([g])[0])
        carries.append(judge.carry[0])
    found = functions.evaluate(PLAY, [name, radius, gradients().tolist()])
    np.testing.assert_allclose([step["update"] for step in found], expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose([step["carry"] for step in found], carries, rtol=1e-9, atol=1e-9)
    if name in ("gated", "capped"):
        assert judge.dropped_norm > 0.0  # the gradients do reach the limits


@pytest.mark.parametrize("name", POLICIES)
def test_delays_are_those_of_the_metrics(functions, name):
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    clipper = UClip([p], Norm(2.0), carry=POLICIES[name], metrics_every=1)
    delays = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryClipWarning)  # the gradients are meant to be bad
        for g in gradients():
            p.grad = torch.from_numpy(g.copy())
            clipper.clip_()
            delays.append(float(clipper.metrics()["delay"]))
    found = [step["delay"] for step in functions.evaluate(PLAY, [name, 2.0, gradients().tolist()])]
    np.testing.assert_allclose(found, delays, rtol=1e-9, atol=1e-9)


class Coin:
    """A generator that gives one number."""

    def __init__(self, value):
        self.value = value

    def random(self, shape):
        return np.full(shape, self.value)


@pytest.mark.parametrize(("name", "problem"), [("aliasing", Aliasing()), ("quadratics", TwoQuadratics())])
def test_gradients_start_and_optimum_are_those_of_the_theory(functions, name, problem):
    for x in (-3.0, -1.5, -0.2, 0.3, 2.0):
        for coin in (0.1, 0.3, 0.7):
            point = np.array([[x]])
            (expected,) = problem.gradient(point, problem.slope(point), Coin(coin))[0]
            found = functions.evaluate(
                "([name, x, coin]) => PROBLEMS[name].gradient([x], {coin, noise: 0})", [name, x, coin]
            )
            assert found == [expected]
    start, best = functions.evaluate("(name) => [PROBLEMS[name].start, PROBLEMS[name].best]", name)
    assert start == [problem.start]
    assert problem.value(np.array([[best]]))[0] == problem.best


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_whole_runs_are_those_of_the_reference(functions, name, momentum):
    """Skewed regression with SGD, from the same random numbers."""
    settings = {"problem": "regression", "radius": 2.0, "lr": 0.005, "momentum": momentum, "steps": STEPS}
    settings |= {"law": "rare", "scale": 40.0, "draw": 3}
    random, last = functions.evaluate(
        "([settings, name]) => { const r = draws(settings, 5); return [r, run(settings, name, r).last]; }",
        [settings, name],
    )
    judge = Reference(Norm(2.0), carry=POLICIES[name])
    weights, velocity = np.zeros(2), np.zeros(2)
    for drawn in random:
        z = 2.0 * drawn["place"] - 1.0
        error = weights @ [1.0, z] - (2.0 + z + drawn["noise"])
        velocity = momentum * velocity + judge.step([error * np.array([1.0, z])])[0]
        weights = weights - 0.005 * velocity
    assert np.abs(weights).max() > 0.01
    np.testing.assert_allclose(last, weights, rtol=1e-9, atol=1e-9)


LAWS = {"gaussian": 1.0, "uniform": 1 / 3, "coin": 1.0, "student": 3.0, "rare": 0.0475, "off": 0.0}


@pytest.mark.parametrize("law", LAWS)
def test_noise_has_mean_zero_and_the_variance_of_its_law(functions, law):
    drawn = functions.evaluate(
        "(law) => { const r = generator(7); return Array.from({length: 200000}, () => LAWS[law].draw(r)); }", law
    )
    assert np.mean(drawn) == pytest.approx(0.0, abs=0.02)
    # A t of 3 degrees has no fourth moment, so that its variance is found slowly.
    assert np.var(drawn) == pytest.approx(LAWS[law], rel=0.2 if law == "student" else 0.02)


def test_lognormal_noise_is_the_skewed_law(functions):
    drawn = functions.evaluate(
        "() => { const r = generator(7); return Array.from({length: 200000}, () => LAWS.skewed.draw(r)); }"
    )
    logs = np.log(np.array(drawn) + np.exp(1.125))
    assert np.mean(logs) == pytest.approx(0.0, abs=0.02)
    assert np.std(logs) == pytest.approx(1.5, rel=0.02)


# ---------------------------------------------------------------------- what one sees


def said(page, picture):
    return page.inner_text(f"#{picture}-words")


def test_plain_clipping_is_seen_to_settle_left_of_the_optimum(visit):
    page = visit("#problem=aliasing&policy=plain")
    found = re.match(r"Plain clipping settles (1\.2\d) ± 0\.0\d to the left of the optimum", said(page, "iterates"))
    assert found, said(page, "iterates")
    assert "what it cuts is lost" in said(page, "carry")
    assert said(page, "bias").startswith(
        "On average at the optimum, as far as these runs can tell: No clipping, carry=True"
    )


def test_the_full_carry_is_seen_to_repair_it_and_to_wait(visit):
    page = visit("#problem=quadratics&policy=full")
    assert said(page, "iterates").startswith("carry=True settles at the optimum")
    waits = re.search(r"waits about ([\d.]+) steps, like a momentum of 0\.80", said(page, "delay"))
    assert float(waits[1]) == pytest.approx(5.0, abs=0.3)  # (1 + (G/r)²)/2 with G = 3
    assert page.inner_text("#note").startswith("For SGD without momentum only")


def test_wind_up_is_told_from_mere_noise(visit):
    page = visit("#problem=regression&policy=full&law=student&scale=5")
    assert "keeps growing" not in said(page, "carry")
    page = visit("#problem=regression&policy=full&momentum=0.9&lr=0.1")
    assert "keeps growing" in said(page, "carry")
    assert said(page, "iterates").startswith("carry=True does not settle: runs differ widely")


def test_a_policy_that_swings_is_not_said_to_settle(visit):
    page = visit("#problem=regression&policy=gated&momentum=0.9&lr=0.1")
    assert re.match(r"Gated\(\) does not settle: it swings by ±\d+ %", said(page, "iterates"))
    swinging = said(page, "bias").split("Swinging widely: ")[1]
    assert "Gated()" in swinging
    assert "Plain clipping" not in swinging
    page = visit("#problem=regression&policy=gated")
    assert said(page, "iterates").startswith("Gated() settles")
    assert "Swinging" not in said(page, "bias")


def test_what_the_docs_tell_to_try_is_there_to_see(visit):
    delays = []
    for radius in (1.5, 1, 0.8):
        page = visit(f"#problem=quadratics&policy=full&radius={radius}")
        assert said(page, "iterates").startswith("carry=True settles at the optimum")
        delays.append(float(re.search(r"waits about ([\d.]+) steps", said(page, "delay"))[1]))
    assert delays == pytest.approx([(1 + (3 / radius) ** 2) / 2 for radius in (1.5, 1, 0.8)], rel=0.1)
    page = visit("#problem=regression&policy=plain")
    assert said(page, "iterates").startswith("Plain clipping settles at 5 ± 0 % of the true total")
    page = visit("#problem=regression&policy=plain&law=student&scale=5")
    shares = re.findall(r"(\d+) ± (\d+) % of the true total", said(page, "iterates"))
    (plain, plain_spread), (_, bare_spread) = [(int(a), int(b)) for a, b in shares]
    assert plain > 85
    assert plain_spread < bare_spread


def test_a_hasty_carry_before_momentum_is_advised_against(visit):
    page = visit("#policy=gated&momentum=0.9")
    assert "The library warns of this line" in page.inner_text("#note")
    assert "momentum=0.9)\nclipper = UClip(optimizer, Norm(2), carry=Gated())" in page.inner_text("#code")


def test_a_run_that_diverges_is_told(visit):
    page = visit("#problem=regression&policy=none&lr=1&momentum=0.99&law=skewed&scale=50")
    assert said(page, "iterates").startswith("No clipping: every run diverges")
    assert "No clipping diverged" in said(page, "bias")


# ---------------------------------------------------------------------- using it


def test_the_address_has_the_state_and_brings_it_back(visit):
    page = visit()
    page.click("label[for=problem-regression]")
    page.click("label[for=policy-drip]")
    page.select_option("#law", "student")
    page.focus("#radius")
    page.keyboard.press("ArrowRight")
    settled(page)
    address = page.evaluate("location.hash")
    assert "problem=regression" in address
    assert "policy=drip" in address
    assert "law=student" in address
    other = visit(address)
    for picture in ("iterates", "carry", "delay", "bias"):
        assert said(other, picture) == said(page, picture)
    assert other.inner_text("#radius-value") == page.inner_text("#radius-value") != "2"


def test_a_broken_address_is_taken_for_the_default(visit):
    page = visit("#problem=constructor&policy=toString&radius=x&lr=-5&seeds=1e9&momentum=NaN&draw=-1")
    assert page.evaluate("settings") == {
        **page.evaluate("defaults('aliasing')"),
        "lr": 0.0005,
        "seeds": 30,
    }


def test_going_back_to_another_address_draws_it(visit):
    page = visit()
    page.evaluate("location.hash = '#problem=quadratics&policy=capped'")
    page.wait_for_selector("#policy-capped:checked")
    settled(page)
    assert said(page, "iterates").startswith("Capped(10)")


def test_everything_can_be_reached_and_moved_by_keyboard(visit):
    page = visit()
    reached = []
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        outline = page.evaluate(
            "(() => { const a = document.activeElement; const s = a.type === 'radio' ? a.nextElementSibling : a;"
            " return getComputedStyle(s).outlineStyle; })()"
        )
        assert outline != "none", reached[-1]
        if reached[-1] == "PRE":
            break
    sliders = ["radius", "lr", "momentum", "law", "seeds", "steps"]  # the scale is off without noise
    assert reached == ["problem-aliasing", "policy-shrunk", *sliders, "again", "reset", "PRE"]
    page.focus("#policy-shrunk")
    page.keyboard.press("ArrowLeft")
    settled(page)
    assert said(page, "iterates").startswith("Drip()")
    page.focus("#again")
    page.keyboard.press("Enter")
    settled(page)
    assert "draw=1" in page.evaluate("location.hash")
    page.focus("#reset")
    page.keyboard.press("Enter")
    settled(page)
    assert "draw=0" in page.evaluate("location.hash")


@pytest.mark.parametrize("slider", ["radius", "lr", "momentum", "scale", "seeds", "steps"])
def test_every_press_of_an_arrow_moves_a_slider(functions, slider):
    """No two positions mean the same number, or an arrow would stick there."""
    functions.select_option("#law", "gaussian")  # without noise there is no scale
    functions.focus(f"#{slider}")
    functions.keyboard.press("Home")
    seen = [functions.inner_text(f"#{slider}-value")]
    for _ in range(5):
        functions.keyboard.press("ArrowRight")
        seen.append(functions.inner_text(f"#{slider}-value"))
    assert [float(value) for value in seen] == sorted({float(value) for value in seen})


def test_every_control_has_a_label_and_every_picture_words(visit):
    page = visit()
    unnamed = page.eval_on_selector_all(
        "input, select", "all => all.filter((each) => each.labels.length === 0).map((each) => each.id)"
    )
    assert unnamed == []
    pictures = page.eval_on_selector_all(
        "svg",
        "all => all.map((each) => [each.id, each.getAttribute('aria-label'),"
        " document.getElementById(each.getAttribute('aria-describedby')).textContent])",
    )
    assert [picture[0] for picture in pictures] == ["iterates", "carry", "delay", "bias"]
    assert all(len(text) > 10 for picture in pictures for text in picture[1:])
    assert page.get_attribute("#lr", "aria-valuetext") == "0.005"


OUTSIDE = """all => all.flatMap((svg) => [...svg.querySelectorAll("text, path, circle")].filter((each) => {
  const [box, own] = [svg.getBoundingClientRect(), each.getBoundingClientRect()];
  return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1 || own.bottom > box.bottom + 1;
}).map((each) => `${svg.id} ${each.textContent} ${each.getAttribute("class")}`))"""


@pytest.mark.parametrize("problem", ["aliasing", "quadratics", "regression"])
def test_pictures_have_axes_and_curves_within_their_frame(visit, problem):
    page = visit(f"#problem={problem}&seeds=3", viewport={"width": 390, "height": 844})
    for policy in ("none", *POLICIES):
        page.click(f"label[for=policy-{policy}]")
        settled(page)
        for picture in ("iterates", "carry", "delay"):
            texts = page.locator(f"#{picture} text").all_text_contents()
            assert "step" in texts
            assert len([text for text in texts if re.fullmatch(r"−?[\d.]+", text)]) >= 5
            curves = 0 if policy == "none" and picture != "iterates" else 1
            assert page.locator(f"#{picture} path.mean").count() == curves
            assert page.locator(f"#{picture} path.run").count() == 3 * curves
        assert page.locator("#bias .centre").count() == 7
        assert page.locator("#bias .chosen").count() == 1
        assert page.eval_on_selector_all("svg", OUTSIDE) == []


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits(visit, width):
    page = visit("#problem=regression", viewport={"width": width, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    overlapping = page.evaluate(
        """() => { const box = (name) => document.querySelector(name).getBoundingClientRect();
        const [a, b] = [box(".settings"), box(".iterates")];
        const inside = [...document.querySelectorAll(".settings *")].every((e) =>
          e.getBoundingClientRect().right <= a.right + 1);
        return !inside || (a.right > b.left + 1 && innerWidth > 1000); }"""
    )
    assert not overlapping


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_the_page_follows_the_readers_colours(visit, scheme, dark):
    page = visit(color_scheme=scheme)
    for part in ("document.body", "document.querySelector('.card')"):
        ground = page.evaluate(f"getComputedStyle({part}).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == dark


# ---------------------------------------------------------------------- the file


def test_the_page_refers_to_nothing_outside(place):
    text = place.read_text(encoding="utf-8")
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|<link|<iframe|<img|src=|href=|\son\w+=\"", text)
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]  # a name, not a place
    assert "default-src 'none'" in text


def test_the_site_gets_the_page(tmp_path):
    """mkdocs, with the hook, puts it beside the page that links to it."""
    source = tmp_path / "docs"
    source.mkdir()
    root = Path(__file__).parents[2]
    shutil.copy(root / "docs" / "playground.md", source)
    hook = root / "docs" / "_playground.py"
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\ntheme: mkdocs\nhooks: ['{hook}']\nplugins: []\n")
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    folder = tmp_path / "site" / "playground"
    assert (folder / "page.html").exists(), done.stderr
    assert (folder / "page.html").read_text(encoding="utf-8") == playground.page()
    assert 'href="page.html"' in (source / "playground.md").read_text(encoding="utf-8")


def test_the_command_says_what_to_open(tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert playground.main(str(tmp_path / "mine.html")) == 0
    assert capsys.readouterr().out == f"Open {tmp_path / 'mine.html'}\n"
    assert opened == [(tmp_path / "mine.html").as_uri()]
    assert playground.main(str(tmp_path), show=False) == 0
    assert (tmp_path / "playground.html").exists()
    assert len(opened) == 1
    assert playground.main(str(tmp_path / "nowhere" / "a.html")) == 2
    assert "make it first" in capsys.readouterr().out
