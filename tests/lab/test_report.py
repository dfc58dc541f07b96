"""The report: one HTML file that works alone, in a real browser, whatever the runs are called."""

import csv
import html
import io
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from carryclip_lab.analysis.claims import Claim
from carryclip_lab.engine.settings import REPORT, STORE
from carryclip_lab.grid import Study, load
from carryclip_lab.report.build import build, lines, main
from carryclip_lab.report.sections import Section, environment, slug
from carryclip_lab.report.theory import TheoryError, read_theory
from carryclip_lab.spec import Spec
from carryclip_lab.store.records import Epoch
from carryclip_lab.store.store import Store
from made import METHODS, record

THEORY = Path(__file__).parents[2] / "docs" / "theory" / "figures"
ATTACK = """</script><img src=x onerror="window.attacked = true">"""
HOSTILE = f"hostile {ATTACK}"
SETTINGS = (*METHODS.values(), {**METHODS["U-Clip"], "carry": "Gated()"})


def specs(**given):
    return [
        Spec(
            **{"task": "cifar10", "lr": 0.1, "epochs": 300, **given}, optimizer=name, batch=batch, seed=seed, **setting
        )
        for name in ("sgd", "adam")
        for batch in (5, 500)
        for seed in range(3)
        for setting in SETTINGS
    ]


def fill(store, study, *, leave=0, crash=None):
    """Results for all runs but the last ones; the first one crashes if a message is given."""
    store.add(study)
    taken = store.take(study.name, "me", limit=len(study.specs) - leave)
    for number, spec in enumerate(taken):
        store.begin(spec.id, "me")
        store.record(spec.id, "me", Epoch(1, loss=1.0, grad_norm=1.0, carry_norm=0.5, radius_norm=0.5, carry_feed=0.1))
        crashed = crash is not None and number == 0
        told = {"message": crash} if crashed else {"reached": 10 + spec.seed + len(spec.label)}
        store.finish(
            spec.id, "me", "crashed" if crashed else "reached", **told, environment={"torch": "2", "os": ATTACK}
        )
    store.give_back("me")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report of three studies: one partial, one of the smoke tier, one with hostile names; and the theory."""
    made = tmp_path_factory.mktemp("report")
    own = {"optimizer": "sgd", "batch": 5, "lr": 0.1, "epochs": 9, "seed": 0, "task": "digits"}
    with Store(made / "runs.sqlite") as store:
        fill(store, Study("small", "Small", "small", tuple(specs())), leave=4)
        fill(store, Study("smoke", "Smoke", "smoke", tuple(specs(task="digits"))))
        odd = Study(HOSTILE, ATTACK, "smoke", (Spec(**own), Spec(**own, method=f"{ATTACK}:f")))
        fill(store, odd, crash=f"RuntimeError: {ATTACK}")
        build(store, ["small", "smoke", HOSTILE], made / "out", theory=THEORY, formats=("svg", "png"))
    return made / "out"


def test_figures_numbers_and_captions_lie_beside_the_page(folder):
    assert {path.name for path in folder.iterdir()} == {"report.html", "claims.json", "figures"}
    names = {path.stem for path in (folder / "figures" / "small").iterdir()}
    assert names == {"epochs", "faster", "ratios", "carry", "outcomes"}
    for name in names:
        kinds = {path.suffix for path in (folder / "figures" / "small").glob(f"{name}.*")}
        assert kinds == {".svg", ".png", ".csv", ".txt"}
    assert (folder / "figures" / slug(HOSTILE)).is_dir()


def test_claims_are_data_too(folder):
    claims = json.loads((folder / "claims.json").read_text(encoding="utf-8"))["claims"]
    assert {claim["id"] for claim in claims} == {*(f"T{n}" for n in range(1, 7)), *(f"C{n}" for n in range(1, 9))}
    small = {claim["id"]: claim for claim in claims if claim["study"] == "small"}
    assert (small["C2"]["verdict"], small["C2"]["tier"]) == ("contradicted", "small")
    assert small["C4"]["verdict"] == "inconclusive"  # four of its runs are not done
    (smoke,) = [claim for claim in claims if claim["id"] == "C2" and claim["study"] == "smoke"]
    assert smoke["verdict"] == "not run at this size"
    assert "scikit-learn's digits" in smoke["ours"]
    assert len([claim for claim in claims if claim["id"] == "C5"]) == 1


class Attributes(HTMLParser):
    """All attributes of all elements."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found += attrs


def test_the_page_refers_to_nothing_outside(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    found = Attributes(text).found
    addresses = [value for name, value in found if name in ("src", "href", "action", "srcset", "style", "poster")]
    assert addresses
    assert all(address.startswith(("#", "data:image/svg+xml;base64,")) for address in addresses)
    assert not [name for name, _ in found if name.startswith("on")]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|<link|<iframe", text)
    assert any("default-src 'none'" in (value or "") for _, value in found)


def test_partial_results_carry_a_banner(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    banner, *_ = re.findall(r'<p class="banner".*?</p>', text, flags=re.DOTALL)
    assert "small: 44 of\n48 runs" in banner
    assert "carryclip reproduce FILE.toml" in banner  # the store does not know a file of these made-up studies


# ---------------------------------------------------------------------- in a browser


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
def visit(browser, folder):
    """Open the page; at the end nothing may have been asked of anyone, nor complained about."""
    contexts, asked, said = [], [], []

    def open_page(**given):
        context = browser.new_context(accept_downloads=True, **given)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((folder / "report.html").as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    own = (folder / "report.html").as_uri()
    assert [url for url in asked if url != own and not url.startswith(("data:", "blob:"))] == []
    assert said == []


def shown(page):
    return page.locator("#runs-table tbody tr").count()


def test_figures_are_there_to_see(visit):
    page = visit()
    sizes = page.eval_on_selector_all(
        "figure img", "all => all.map((image) => [image.naturalWidth, image.naturalHeight, image.clientWidth])"
    )
    assert len(sizes) == 10 + 5 + 5 + 1 + 1  # the theory's, two studies', and what two runs have to show
    assert all(min(size) > 100 for size in sizes)
    assert page.locator("figure img:not([alt])").count() == 0


def test_runs_can_be_filtered(visit):
    page = visit()
    assert page.inner_text("#runs-count") == "98 of 98 runs"
    page.select_option("#runs-study", label="small")
    assert page.inner_text("#runs-count") == "48 of 98 runs"
    page.select_option("#runs-optimizer", label="SGD")
    page.select_option("#runs-method", label="U-Clip")
    page.select_option("#runs-batch", label="500")
    assert page.inner_text("#runs-count") == "3 of 98 runs"
    assert shown(page) == 3
    page.click("text=Show all")
    page.locator("#runs-count:text-is('98 of 98 runs')").wait_for()
    page.fill("#runs-text", "waiting small")
    page.locator("#runs-count:text-is('4 of 98 runs')").wait_for()
    page.fill("#runs-text", "no such thing")
    page.locator("#runs-count:text-is('0 of 98 runs')").wait_for()
    assert page.inner_text("#runs-page") == "no rows"


def test_a_filter_for_no_region(visit):
    page = visit()
    page.select_option("#runs-region", label="(none)")
    assert page.inner_text("#runs-count") == "26 of 98 runs"


def test_runs_can_be_sorted_with_the_unknown_last(visit):
    page = visit()
    page.select_option("#runs-study", label="small")
    column = "#runs-table tbody td:nth-child(10)"
    for expected in (sorted, lambda values: sorted(values, reverse=True)):
        page.click("#runs-table th button:has-text('epochs')")
        values = page.locator(column).all_inner_texts()
        known = [int(value) for value in values if value]
        assert known == expected(known)
        assert values[-4:] == [""] * 4


def test_claims_can_be_chosen_by_verdict(visit):
    page = visit()
    rows = page.locator(".claims tbody tr:visible")
    every = rows.count()
    chip = page.locator(".chip[data-verdict='holds in part']")
    chip.focus()
    page.keyboard.press("Enter")
    assert chip.get_attribute("aria-pressed") == "true"
    assert 0 < rows.count() < every
    assert set(
        page.locator(".claims tbody tr:visible .verdict").evaluate_all("all => all.map((e) => e.dataset.verdict)")
    ) == {"holds in part"}
    chip.click()
    assert rows.count() == every


def test_a_figure_can_be_looked_at_closely(visit):
    page = visit()
    button = page.locator("#small-epochs .picture")
    button.focus()
    page.keyboard.press("Enter")
    assert page.locator("#zoom").is_visible()
    assert page.inner_text("#zoom-title") == "Epochs to the target against batch size"
    image = page.locator("#zoom img")
    fitted = image.bounding_box()["width"]
    page.keyboard.press("+")
    assert image.bounding_box()["width"] == pytest.approx(1.25 * fitted, rel=0.01)
    page.locator("#zoom-stage").hover()
    page.mouse.wheel(0, -400)
    for _ in range(500):  # the wheel's event comes when it comes
        if image.bounding_box()["width"] > 1.5 * fitted:
            break
        page.wait_for_timeout(20)
    assert image.bounding_box()["width"] > 1.5 * fitted
    left = image.bounding_box()["x"]
    page.keyboard.press("ArrowRight")
    assert image.bounding_box()["x"] == pytest.approx(left - 80, abs=1)
    page.keyboard.press("0")
    assert image.bounding_box()["width"] == pytest.approx(fitted, rel=0.01)
    page.keyboard.press("Escape")
    assert not page.locator("#zoom").is_visible()
    assert page.evaluate("document.activeElement.className") == "picture"


def test_everything_can_be_saved_from_the_page_itself(visit):
    page = visit()

    def saved(what):
        with page.expect_download() as download:
            page.click(what)
        return download.value.suggested_filename, Path(download.value.path()).read_text(encoding="utf-8")

    name, text = saved("#small-epochs [data-save=numbers]")
    assert name == "small-epochs.csv"
    assert len(list(csv.DictReader(io.StringIO(text)))) == 16
    name, text = saved("#small-epochs [data-save=picture]")
    assert name == "small-epochs.svg"
    assert "<svg" in text
    page.select_option("#runs-study", label="small")
    rows = list(csv.DictReader(io.StringIO(saved("[data-save=runs-csv]")[1])))
    assert len(rows) == 48
    assert {row["study"] for row in rows} == {"small"}
    everything = json.loads(saved("[data-save=all-json]")[1])
    assert everything["runs"]["length"] == 98
    assert {claim["id"] for claim in everything["claims"]} >= {"T1", "C1"}


def test_hostile_text_stays_text(visit):
    page = visit()
    page.select_option("#runs-outcome", label="crashed")
    assert page.inner_text("#runs-count") == "1 of 98 runs"
    assert ATTACK in page.locator("#runs-table tbody").inner_text()
    page.locator(".crashed summary").click()
    assert page.locator(".crashed pre").inner_text() == f"RuntimeError: {ATTACK}"
    assert ATTACK in page.locator("main h2").all_inner_texts()[-3]  # before the theory and the runs
    assert page.evaluate("window.attacked") is None
    assert page.locator("img[src='x']").count() == 0


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_the_page_follows_the_readers_colours(visit, scheme, dark):
    page = visit(color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == dark


def test_the_page_fits_a_phone(visit):
    page = visit(viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_panels_stand_below_each_other_on_a_phone(visit):
    page = visit(viewport={"width": 390, "height": 844})
    picture = page.locator("#theory-aliasing .picture")
    lines = picture.locator(".strip")
    boxes = [lines.nth(number).bounding_box() for number in range(lines.count())]
    assert len(boxes) == 2
    assert boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"]
    assert all(box["width"] > 300 for box in boxes)
    assert not picture.locator("> img").is_visible()
    page.set_viewport_size({"width": 1280, "height": 900})
    assert picture.locator("> img").is_visible()
    assert lines.count() == 0


def test_the_first_screen_says_what_it_is_and_what_came_out(visit):
    page = visit(viewport={"width": 1280, "height": 900})
    lead = " ".join(page.locator("header").inner_text().split())
    assert "gradient clipping that keeps what it cuts off" in lead
    assert "U-Clip is the paper's carry, carry=True, and Shrunk (default) is what UClip(optimizer, region) does" in lead
    for words in ("ahead of plain clipping in", "batch 500"):
        assert page.get_by_text(words).first.bounding_box()["y"] < 900
    order = [page.locator(name).bounding_box()["y"] for name in ("#results", "#claims", "#small", "#theory", "#runs")]
    assert order == sorted(order)


def test_claims_without_runs_are_folded(visit):
    page = visit()
    row = page.locator("#waiting tr[data-verdict]").first
    assert page.locator("#claims > table [data-verdict='not run at this size']").count() == 0
    assert not row.is_visible()
    page.click(".chip[data-verdict='not run at this size']")
    assert row.is_visible()


def test_what_is_chosen_is_in_the_address(visit):
    page = visit()
    page.select_option("#runs-outcome", label="crashed")
    page.click("#runs-table th button:has-text('epochs')")
    page.click("#runs-table th button:has-text('epochs')")
    page.click(".chip[data-verdict='contradicted']")
    assert "outcome=crashed" in page.url
    other = visit()
    other.goto(page.url)
    other.reload()  # a browser that has the page already only scrolls
    assert other.locator("#runs-count").inner_text() == page.locator("#runs-count").inner_text()
    assert other.locator("#runs-outcome option:checked").inner_text() == "crashed"
    assert other.locator("#runs-table th[aria-sort='descending']").inner_text() == "epochs ▼"
    assert other.locator(".chip[aria-pressed='true']").get_attribute("data-verdict") == "contradicted"
    other.click(".filters button[type='reset']")
    other.click("#runs-table th button:has-text('epochs')")
    other.click(".chip[data-verdict='contradicted']")
    other.wait_for_function("!location.hash.includes('outcome')")


# ---------------------------------------------------------------------- parts


def line(name, tier, ours="seen"):
    return Claim(name, "", "", ours, "holds" if ours else "not run at this size", tier=tier)


def test_a_study_with_nothing_to_say_is_silent_if_another_speaks():
    small = Section("small", "small", "", "small", claims=[line("C1", "small"), line("C5", "small", "")])
    paper = Section("paper", "paper", "", "paper", claims=[line("C1", "paper"), line("C5", "paper", "")])
    theory = Section("theory", "theory", "", "paper", claims=[line("T1", "paper")])
    told = [(claim.id, section.name) for claim, section in lines([small, paper, theory])]
    assert told == [("C1", "paper"), ("C1", "small"), ("C5", "small"), ("T1", "theory")]


def test_the_environment_is_told_once():
    records = [record(5, seed, environment={"torch": "2", "host": f"h{seed}"}) for seed in range(6)]
    assert environment(records) == [("host", "h0, h1, h2, h3 and 2 more"), ("torch", "2")]


def test_the_theory_is_read_from_its_folder(tmp_path):
    section = read_theory(THEORY)
    assert [claim.id for claim in section.claims] == ["T1", "T2", "T3", "T4", "T5", "T6"]
    assert {(claim.tier, claim.seeds, claim.command) for claim in section.claims} == {
        ("paper", 1000, "carryclip reproduce theory")
    }
    assert section.pictures[0].title.startswith("Aliasing")
    with pytest.raises(TheoryError, match=r"has no claims\.json; make it with: carryclip reproduce theory"):
        read_theory(tmp_path)
    (tmp_path / "claims.json").write_text("{")
    with pytest.raises(TheoryError, match="cannot be read"):
        read_theory(tmp_path)
    (tmp_path / "claims.json").write_text('{"setting": {}, "claims": [{"id": "T1", "verdict": "great"}]}')
    with pytest.raises(TheoryError, match="there is no verdict 'great'"):
        read_theory(tmp_path)


# ---------------------------------------------------------------------- the command


def test_the_command_says_what_to_open(tmp_path, capsys):
    with Store(tmp_path / "runs.sqlite") as store:
        fill(store, Study("tiny", "Tiny", "smoke", tuple(specs(task="digits")[:4])))
    assert main(str(tmp_path / "runs.sqlite"), [], str(tmp_path / "out"), None) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == f"Open {tmp_path / 'out' / 'report.html'}"
    assert {path.suffix for path in (tmp_path / "out" / "figures" / "tiny").iterdir()} == {
        *(".svg", ".png", ".pdf", ".csv", ".txt")
    }


def test_a_study_without_results_has_a_page_too(tmp_path):
    with Store(tmp_path / "runs.sqlite") as store:
        store.add(Study("new", "New", "small", tuple(specs())))
        text = build(store, ["new"], tmp_path, formats=()).read_text(encoding="utf-8")
    assert "0 of 48 runs" in text
    assert "Partial results." in text


def test_claims_of_which_none_is_judged_leave_the_room_to_figures(browser, tmp_path):
    own = {"task": "digits", "optimizer": "sgd", "batch": 64, "lr": 0.1, "epochs": 40}
    chosen = ({}, METHODS["clip"], {**METHODS["U-Clip"], "carry": "Shrunk()"}, {"method": "mine:median"})
    runs = tuple(Spec(**own, seed=seed, **each) for each in chosen for seed in range(2))
    with Store(tmp_path / "runs.sqlite") as store:
        fill(store, Study("median", "My own", "smoke", runs))
        address = build(store, ["median"], tmp_path / "out", formats=()).as_uri()
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(address)
    try:
        assert "mine:median: ahead of plain clipping in" in page.inner_text(".words")
        assert not page.locator("#waiting tr[data-verdict]").first.is_visible()
        assert page.locator(".chip").count() == 0
        assert page.locator("#claims").bounding_box()["height"] < 200
        assert "claims of the paper" not in page.inner_text("header")
        assert "U-Clip needs fewer" not in page.inner_text("main")
        page.click("#waiting summary")
        assert page.locator("#waiting tr[data-verdict]").count() == 8
        assert page.locator("#waiting tr[data-verdict]").first.is_visible()
    finally:
        page.close()


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((STORE, REPORT, None), ""),
        (("my runs.sqlite", REPORT, None), " --store 'my runs.sqlite'"),
        (("s.sqlite", "rep", "theory"), " --store s.sqlite --out rep --theory theory"),
    ],
)
def test_what_goes_on_is_the_command_that_was_given(tmp_path, monkeypatch, arguments, options):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(THEORY, tmp_path / "theory")
    store, out, theory = arguments
    with Store(store) as opened:
        fill(opened, replace(load("digits-smoke"), specs=tuple(specs(task="digits")[:4])), leave=1)
    assert main(store, [], out, theory) == 0
    page = html.unescape((tmp_path / out / "report.html").read_text(encoding="utf-8"))
    assert f"Go on with <code>carryclip reproduce digits-smoke{options}</code>" in page


@pytest.mark.parametrize("default", [False, True])
def test_the_page_says_where_the_default_carry_was_not_run(tmp_path, default):
    chosen = (*METHODS.values(), {**METHODS["U-Clip"], "carry": "Shrunk()"}) if default else METHODS.values()
    runs = [Spec(task="digits", optimizer="sgd", lr=0.1, epochs=9, batch=5, seed=0, **each) for each in chosen]
    with Store(tmp_path / "runs.sqlite") as store:
        store.add(Study("new", "New", "small", tuple(runs)))
        text = build(store, ["new"], tmp_path, formats=()).read_text(encoding="utf-8")
    said = "The default of carryclip, Shrunk (default), is not in this study."
    assert (said in text) != default
    if not default:
        assert text.index(said) < text.index('<section id="results"')


def test_what_is_wrong_is_said(tmp_path, capsys):
    store = tmp_path / "runs.sqlite"
    assert main(str(store), [], str(tmp_path / "out"), None) == 2
    assert "carryclip reproduce makes one" in " ".join(capsys.readouterr().out.split())
    assert not store.exists()
    Store(store).close()
    assert main(str(store), [], str(tmp_path / "out"), None) == 2
    assert "has no runs yet" in " ".join(capsys.readouterr().out.split())
    assert main(str(store), ["smal"], str(tmp_path / "out"), None) == 2
    assert "has no study 'smal'" in " ".join(capsys.readouterr().out.split())
    with Store(store) as opened:
        opened.add(Study("tiny", "Tiny", "smoke", tuple(specs(task="digits")[:1])))
    assert main(str(store), ["tiny"], str(tmp_path / "out"), str(tmp_path / "nowhere")) == 2
    assert "has no claims.json" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "file").write_text("")
    assert main(str(store), ["tiny"], str(tmp_path / "file"), None) == 2
    assert "Choose another folder" in " ".join(capsys.readouterr().out.split())
