"""The commands around ImageNet: planning, checking folders, the table, evaluating, and what they say to bad input."""

import dataclasses
import html
import io
import re

import pytest
from rich.console import Console

from carryclip_lab.analysis import accuracy
from carryclip_lab.analysis.naming import method_of, region_name
from carryclip_lab.analysis.summary import summarise
from carryclip_lab.analysis.verdicts import same_table
from carryclip_lab.commands import plan, reproduce
from carryclip_lab.engine import display
from carryclip_lab.engine.settings import Options
from carryclip_lab.figures import draw
from carryclip_lab.grid import load, read
from carryclip_lab.imagenet import inspect
from carryclip_lab.spec import Spec
from carryclip_lab.store.export import export
from carryclip_lab.store.records import Epoch, Record
from carryclip_lab.store.store import Store
from pictures import SPEC, STUDY, folder


def said(capsys):
    """What was printed, as if the terminal were wide."""
    return re.sub(r"\s+", " ", capsys.readouterr().out)


# ---------------------------------------------------------------------- specs


def test_the_papers_grid_has_thirteen_rows_of_five_seeds():
    study = load("imagenet-paper")
    assert len(study.specs) == 65
    assert len({(spec.region, spec.carry) for spec in study.specs}) == 13
    (recipe,) = {spec.recipe for spec in study.specs}
    assert (recipe.net, recipe.image, recipe.micro, recipe.warmup) == ("resnet50", 224, 128, 5)
    assert (recipe.decay, recipe.smoothing, recipe.classes, recipe.images) == (1e-4, 0.1, 1000, 1_281_167)
    assert {(spec.optimizer, spec.lr, spec.batch, spec.epochs) for spec in study.specs} == {("nesterov", 0.1, 4096, 90)}
    rows = {(region_name(spec.region), method_of(spec)) for spec in study.specs}
    assert rows == set(accuracy.PAPER)


def test_settings_are_part_of_a_run_and_of_its_id():
    one = Spec.read(SPEC)
    assert Spec.read({**SPEC, "image": 17}).id != one.id
    assert Spec.from_canonical(one.canonical) == one
    assert one.target is None
    assert one.recipe.net == "resnet10"
    with pytest.raises(ValueError, match="there is no 'imag'; did you mean 'image'"):
        Spec.read({**SPEC, "imag": 17})
    with pytest.raises(ValueError, match="there is no net 'resnet51'; did you mean 'resnet50'"):
        Spec.read({**SPEC, "net": "resnet51"})
    with pytest.raises(ValueError, match="image must be a whole number, at least 8; got 'big'"):
        Spec.read({**SPEC, "image": "big"})
    with pytest.raises(ValueError, match="decay must be a number at least 0 and below 1"):
        Spec.read({**SPEC, "decay": 3})
    with pytest.raises(ValueError, match="there is no 'image'"):
        Spec.read({"task": "digits", "optimizer": "sgd", "lr": 0.1, "batch": 8, "epochs": 2, "seed": 0, "image": 16})


# ---------------------------------------------------------------------- planning


def ask(*what, **given):
    usual = {"tier": None, "store": "none.sqlite", "workers": None, "threads": 1, "device": "cpu", "data": None}
    return plan.ask(what, **{**usual, "images_per_second": None, **given})


def test_the_papers_study_is_priced_at_a_given_speed(capsys):
    assert ask("imagenet", tier="paper", images_per_second=2500.0) == 0
    text = said(capsys)
    seconds = 65 * 90 * (1_281_167 + 50_000 / 3) / 2500
    assert f"{seconds / 86400:.0f} days" in text
    assert "priced at 2,500 images/s for each run, as you gave it, not measured here" in text
    assert ask("imagenet-paper", images_per_second=-1.0) == 2
    assert "--images-per-second must be above 0" in said(capsys)


def test_a_family_needs_a_tier(capsys):
    assert ask("imagenet") == 2
    assert "Of which size? There are imagenet-mini (--tier small), imagenet-paper (--tier paper)" in said(capsys)


def test_a_study_of_unknown_size_is_left_out(capsys, tmp_path):
    assert ask("imagenet-mini") == 2
    assert "imagenet-mini depends on the images: say --data DIR." in said(capsys)
    assert ask("imagenet-mini", images_per_second=100.0, data=str(folder(tmp_path / "data"))) == 0
    assert "imagenet-mini" in said(capsys)


def test_the_time_left_counts_no_work_of_an_earlier_start(monkeypatch, tmp_path):
    """One of two runs is half done, and tells its four epochs again; then each epoch takes a minute."""
    study = read(STUDY.replace("epochs = 16", "epochs = 8"), "pair.toml")
    now = 100.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    with Store(tmp_path / "s.sqlite") as store:
        store.add(study)
        (spec,) = store.take("pair", "first")
        for k in range(4):
            store.record(spec.id, "first", Epoch(k + 1))
        store.give_back("first")
        console = Console(file=io.StringIO(), width=200)
        seen = display.Display(console, store, study, {spec.id for spec in study.specs})
        store.take("pair", "second")
        store.begin(spec.id, "second")
        for k in range(4):
            store.record(spec.id, "second", Epoch(k + 1))
        now += 5.0
        seen.tick()
        assert "25% of the work" in console.file.getvalue()
        assert "time left not known yet" in console.file.getvalue()
        now += 55.0
        store.record(spec.id, "second", Epoch(5))
        seen.tick()
        assert console.file.getvalue().endswith("about 11.0 min left\n")


def test_a_short_run_off_a_terminal_says_more_than_one_line(monkeypatch, tmp_path):
    study = read(STUDY.replace("epochs = 16", "epochs = 8"), "pair.toml")
    now, said = 100.0, []
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    with Store(tmp_path / "s.sqlite") as store:
        store.add(study)
        console = Console(file=io.StringIO(), width=200)
        seen = display.Display(console, store, study, {spec.id for spec in study.specs})
        for second in range(0, 121):
            now = 100.0 + second
            before = console.file.tell()
            seen.tick()
            if console.file.tell() > before:
                said.append(second)
    assert said == [0, 5, 10, 20, 40, 70, 100]


def test_timing_says_how_far_it_is(monkeypatch):
    now = 100.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    console = Console(file=io.StringIO(), width=40)
    with display.Timings(console) as tell:
        for number in range(1, 13):
            tell(number, 40, f"digits, batch {number}")
            now += 1.0
        for _ in range(20):
            tell(12, 40, "digits, batch 12")
            now += 1.0
    assert console.file.getvalue().splitlines() == [
        "Timing 1 of 40: digits, batch 1",
        "Timing 6 of 40: digits, batch 6",
        "Timing 11 of 40: digits, batch 11",
        "Timing 12 of 40: digits, batch 12",
    ]
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with display.Timings(console) as tell:
        tell(3, 40, "digits, batch [3]")
        tell._bar.refresh()
    assert "3 of 40: digits, batch [3]" in console.file.getvalue()


# ---------------------------------------------------------------------- folders


def test_a_folder_is_checked_image_by_image(capsys, tmp_path):
    data = folder(tmp_path / "data")
    assert inspect.check(str(data)) == 0
    text = said(capsys)
    assert "Every image can be read" in text
    assert re.search(r"resized to 224 pixels: [\d,]+ images/s here, [\d,]+ per core\. 1,000 images/s would take", text)
    (data / "val" / "class-2" / "1.jpeg").write_bytes(b"broken")
    assert inspect.check(str(data)) == 1
    assert "1 images cannot be read" in said(capsys)
    assert inspect.check(None) == 2
    assert "carryclip data imagenet --from DIR" in said(capsys)


def test_cores_are_counted_by_the_time_that_they_were_busy():
    told = inspect._speed(500, seconds=4.0, busy=2.0)
    assert told.endswith("125 images/s here, 250 per core. 1,000 images/s would take 4 cores.")
    assert inspect._speed(500, seconds=4.0, busy=0.1).endswith("1,000 images/s would take 1 core.")


def run(study, tmp_path, tier=None, only=(), **options):
    given = {
        "tier": tier,
        "only": only,
        "store": str(tmp_path / "s.sqlite"),
        "resume": True,
        "out": str(tmp_path / "out"),
    }
    return reproduce.main([study], **given, options=Options(workers=1, **options))


def test_what_cannot_be_is_said_before_anything_starts(capsys, tmp_path):
    assert run("imagenet-mini", tmp_path) == 2
    assert "Where are the images? Say --data DIR" in said(capsys)
    assert run("imagenet-mini", tmp_path, data=str(tmp_path / "nowhere")) == 2
    assert "There is no folder" in said(capsys)
    data = folder(tmp_path / "data")
    assert run("imagenet-mini", tmp_path, data=str(data)) == 2
    assert "A batch of 64 is more than the 27 training images" in said(capsys)
    study = tmp_path / "pair.toml"
    study.write_text(STUDY.replace("micro = 4", "micro = 5"))
    assert run(str(study), tmp_path, data=str(data)) == 2
    assert "cannot be cut into micro-batches of 5" in said(capsys)
    study.write_text(STUDY.replace("warmup = 1", "warmup = 16"))
    assert run(str(study), tmp_path, data=str(data)) == 2
    assert "A warm-up of 16 epochs leaves none of 16" in said(capsys)
    assert not (tmp_path / "s.sqlite").exists()


def test_torchrun_is_for_images_only(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert run("digits-smoke", tmp_path) == 2
    assert "torchrun is for imagenet; digits runs in workers" in said(capsys)
    assert run("imagenet-smoke", tmp_path, device="cuda:1") == 2
    assert "each process takes the GPU of its number" in said(capsys)
    assert run("imagenet-smoke", tmp_path, device="cuda") == 2
    assert "Cannot train on 'cuda' here" in said(capsys)
    assert run("imagenet-smoke", tmp_path, timeout=60.0) == 2
    assert "--timeout is for workers" in said(capsys)


# ---------------------------------------------------------------------- a study to its end


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two runs of a tiny study, with their last checkpoints."""
    place = tmp_path_factory.mktemp("finished")
    data, study = folder(place / "data"), place / "pair.toml"
    study.write_text(STUDY.replace("epochs = 16", "epochs = 2"))
    assert run(str(study), place, data=str(data), keep=True) == 0
    return place


def test_the_report_has_the_table_and_the_figures(finished):
    page = (finished / "out" / "report.html").read_text()
    assert '<table class="results">' in page
    assert "no clipping" in page
    assert "61.2" in page  # the claim's own words
    assert "the paper</th>" not in page  # whose numbers stand beside runs of its size only
    assert "means over all steps of each epoch" in page
    names = {path.name for path in (finished / "out" / "figures" / "pair").iterdir()}
    assert {"accuracy.svg", "trajectory.svg", "accuracy.csv", "trajectory.txt"} <= names


def test_a_dry_run_needs_no_images(monkeypatch, tmp_path, capsys):
    """One row of the smoke tier, on pictures that it makes itself: from nothing to table and figures."""
    monkeypatch.setenv("CARRYCLIP_DATA", str(tmp_path / "data"))
    assert run("imagenet", tmp_path, "smoke", ["region=Adaptive(1, 2, EWMA(0.95))", "carry=full"]) == 0
    text = said(capsys)
    assert "10 classes, 320 images of 48 pixels" in text
    assert "imagenet-smoke: 1 of 1 runs, 1 reached" in text
    with Store(tmp_path / "s.sqlite", create=False) as store:
        (record,) = store.records("imagenet-smoke", ["reached"])
        best = 100 * max(epoch.test_accuracy for epoch in store.epochs(record.spec.id))
    assert re.search(rf"EWMA \(1, 2\) . yes . {best:.1f} ", text)
    page, figures = (tmp_path / "out" / "report.html").read_text(), tmp_path / "out" / "figures" / "imagenet-smoke"
    assert '<table class="results">' in page
    for name in ("accuracy", "trajectory"):
        assert {path.name for path in figures.glob(f"{name}.*")} >= {f"{name}.svg", f"{name}.txt"}
        assert (figures / f"{name}.txt").read_text().strip() in html.unescape(page)


def test_weights_that_are_kept_give_the_accuracy_again(finished, capsys):
    with Store(finished / "s.sqlite", create=False) as store:
        found = {record.spec.id: store.epochs(record.spec.id)[-1] for record in store.records("pair")}
    for name, epoch in found.items():
        assert inspect.evaluate(name[:10], str(finished / "s.sqlite"), str(finished / "data"), "cpu") == 0
        assert f"top-1 accuracy {100 * epoch.test_accuracy:.2f} % on 12 images" in said(capsys)
    (finished / "s.sqlite.weights" / f"{next(iter(found))}.pt").rename(finished / "elsewhere.pt")
    assert inspect.evaluate(next(iter(found)), str(finished / "s.sqlite"), str(finished / "data"), "cpu") == 2
    assert "started with --keep" in said(capsys)
    (finished / "elsewhere.pt").rename(finished / "s.sqlite.weights" / f"{next(iter(found))}.pt")


def test_exports_have_the_settings(finished, tmp_path):
    with Store(finished / "s.sqlite", create=False) as store:
        export(store, tmp_path, ["csv"])
    assert '""net"": ""resnet10""' in (tmp_path / "runs.csv").read_text()


# ---------------------------------------------------------------------- the table


def paper_summary(tier="paper", shift=0.0, outcome="reached", **settings):
    """Every run of the paper's grid, with the paper's medians; the last seed may have ended in another way."""
    best, records = {}, []
    for spec in load("imagenet-paper").specs:
        spec = dataclasses.replace(spec, settings=(*spec.settings, *settings.items()))
        median, spread = accuracy.PAPER[region_name(spec.region), method_of(spec)]
        best[spec.id] = (median + shift + spread * (spec.seed - 2) / 2) / 100
        records.append(Record(spec, "done", outcome if spec.seed == 4 else "reached", 90, 1.0, None, {}))

    def epochs(run):
        return [
            Epoch(k + 1, loss=2.0 - 0.1 * k, test_accuracy=best[run] - 0.1 * (k != 1), grad_norm=1.0, carry_norm=0.5)
            for k in range(3)
        ]

    (made,) = summarise("imagenet-paper", "ImageNet", tier, records, epochs)
    return made


def test_the_table_has_medians_of_the_best_epochs_and_ranges():
    summary = paper_summary()
    heads, lines, _ = accuracy.table(summary)
    assert heads[-1] == "the paper"
    assert lines[-1] == ["Welford (10, 0)", "yes", "61.2 ± 1.2", "5", "61.2 ± 1.2"]
    assert all(line[2].split()[0] == line[4].split()[0] for line in lines)
    assert [line[1] for line in lines if line[0] == "no clipping"] == [""]
    assert draw("accuracy", summary) is not None
    caption = draw("trajectory", summary).caption
    assert "EWMA (1, 2)" in caption
    assert "means over one step in 31 of each epoch" in caption


def test_the_papers_numbers_stand_beside_its_own_size_only():
    small = paper_summary(tier="small")
    assert "the paper" not in accuracy.table(small).heads
    assert accuracy.judged(small)[0].verdict == "not run at this size"
    assert accuracy.judged(paper_summary())[0].verdict == "holds"
    other = paper_summary(data="a folder", classes=10, images=9469, tests=3925)
    assert "the paper" not in accuracy.table(other).heads
    assert accuracy.judged(other)[0].verdict == "not run at this size"
    assert accuracy.judged(paper_summary(shift=-3.0))[0].verdict == "contradicted"


def test_runs_that_failed_are_no_seeds():
    (none,) = [row for row in accuracy.rows_of(paper_summary(outcome="crashed")) if row.name == "no clipping"]
    assert len(none.best) == 4
    (none,) = [row for row in accuracy.rows_of(paper_summary(outcome="diverged")) if row.name == "no clipping"]
    assert len(none.best) == 5


def test_learning_rates_and_settings_are_no_seeds():
    specs = [
        Spec.read({**SPEC, "lr": lr, "image": image, "seed": seed})
        for lr in (0.1, 0.2)
        for image in (16, 24)
        for seed in (0, 1)
    ]
    best = {spec.id: 0.5 + spec.lr + spec.seed / 100 for spec in specs}
    records = [Record(spec, "done", "reached", 3, 1.0, None, {}) for spec in specs]
    parts = summarise("study", "A study", "small", records, lambda run: [Epoch(1, test_accuracy=best[run])])
    assert [dict(part.settings)["image"] for part in parts] == [16, 24]
    for part in parts:
        (row,) = accuracy.rows_of(part)
        assert row.best == pytest.approx((70.0, 71.0))
        assert row.name == "no clipping (batch 8, lr 0.2)"


def test_image_studies_are_left_out_of_a_tier_without_images(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    chosen = [load("cifar10-slice"), load("imagenet-mini")]
    kept = reproduce.with_data(chosen, {}, Options(), console)
    assert [study.name for study in kept] == ["cifar10-slice"]
    assert "imagenet-mini is left out: it needs --data DIR." in console.file.getvalue()
    kept = reproduce.with_data(chosen, {"task": {"cifar10"}}, Options(data=str(tmp_path)), console)
    assert [study.name for study in kept] == ["cifar10-slice"]


def test_the_verdict_on_a_table():
    assert same_table([(77.0, 77.1, 0.1), (60.0, 61.2, 1.2)], 2) == "holds"
    assert same_table([(77.0, 77.1, 0.1)] * 3 + [(50.0, 61.2, 1.2)], 4) == "holds in part"
    assert same_table([(76.0, 77.1, 0.1), (50.0, 61.2, 1.2)], 2) == "contradicted"
    assert same_table([(77.0, 77.1, 0.1)], 2) == "inconclusive"


def test_a_study_file_may_have_settings_in_its_grids():
    study = read(STUDY.replace("image = 16", "image = [16, 24]"), "pair.toml")
    assert sorted({spec.recipe.image for spec in study.specs}) == [16, 24]
    assert len(study.specs) == 4
