"""Is the carry worth having: effects seed by seed, bias with its noise taken out, and the rules of the answers."""

import io
import math
import re

import numpy as np
import pytest
from rich.console import Console

from carryclip_lab.analysis import answers as answering
from carryclip_lab.analysis import tables
from carryclip_lab.analysis.answers import answers, helps, keeps_up, removes
from carryclip_lab.analysis.compare import Effect
from carryclip_lab.analysis.kinds import kind_of
from carryclip_lab.analysis.naming import CLIP, FULL, GATED, SHRUNK, Method
from carryclip_lab.analysis.summary import summarise
from carryclip_lab.analysis.worth import Bias, bias, blocks, effect, stills
from carryclip_lab.commands.terminal import table
from carryclip_lab.figures import draw
from carryclip_lab.spec import Spec
from carryclip_lab.store.records import Epoch, Record

GIVEN = {"task": "regression", "law": "skewed", "optimizer": "sgd", "batch": 8, "epochs": 2, "steps": 10}
WAYS = {
    "no clipping": {},
    "clip": {"region": "Norm(0.5)", "carry": "none"},
    "U-Clip": {"region": "Norm(0.5)", "carry": "full"},
    "Gated": {"region": "Norm(0.5)", "carry": "Gated()"},
    "Shrunk (default)": {"region": "Norm(0.5)", "carry": "Shrunk()"},
    "clip at Quantile(0.9)": {"region": "Norm(Quantile(0.9))", "carry": "none"},
    "ZClip + U-Clip": {"method": "carryclip.experiments.peers:ZScore", "carry": "full"},
}
DISTANCES = {
    "no clipping": 1.0,
    "clip": 3.0,
    "U-Clip": 1.1,
    "Gated": 1.2,
    "Shrunk (default)": 1.3,
    "ZClip + U-Clip": 2.0,
    "clip at Quantile(0.9)": 1.4,
}


def study(distances=DISTANCES, *, seeds=4, done=True, fates=None, **settings):
    """Runs at two learning rates, of which the first is the worse by 1, with a little noise that seeds share."""
    records, epochs = [], {}
    for name, value in distances.items():
        for lr in (0.1, 0.3):
            for seed in range(seeds):
                spec = Spec.read({**GIVEN, **settings, **WAYS[name], "lr": lr, "seed": seed})
                found = value + (lr == 0.1) + 0.01 * seed + 0.001 * (seed % 2) * len(name)
                fate = (fates or {}).get((name, lr), "reached")
                loss = 0.5 if fate == "reached" else None
                measured = {"distance": found, "iterate": [found, 0.02 * (-1) ** seed]} if loss else {}
                epochs[spec.id] = [
                    Epoch(
                        1, loss=1.0, metrics={"distance": 9.0, "iterate": [9.0, 0.0]}, carry_norm=1.0, radius_norm=0.5
                    ),
                    Epoch(2, loss=loss, metrics=measured, carry_norm=2.0, radius_norm=0.5, clipped_fraction=0.25),
                ]
                state = ("done", fate, 2, 1.5, None) if done else ("waiting", None, None, None, None)
                records.append(Record(spec, *state, {}))
    (summary,) = summarise("study", "A study", "small", records, epochs.__getitem__)
    return summary


def test_an_effect_is_students_interval_of_the_differences():
    found = effect({0: 1.0, 1: 2.0, 2: 3.0, 9: 0.0}, {0: 2.0, 1: 3.1, 2: 3.9, 8: 5.0})
    assert found.seeds == 3
    assert found.value == pytest.approx(1.0)
    assert found.high - found.value == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)  # t of two degrees
    assert effect({0: 1.0}, {1: 1.0}) is None
    assert effect({0: math.inf, 1: 1.0}, {0: 1.0, 1: 1.0}).value == -math.inf
    assert effect({0: 1.0}, {0: math.inf}).value == math.inf
    assert math.isnan(effect({0: math.inf}, {0: math.inf}).value)


def test_bias_is_told_from_noise():
    generator = np.random.default_rng(0)
    errors = generator.normal(size=(40, 5))
    assert bias(errors).low == 0.0
    errors[:, 2] += 3.0
    found = bias(errors)
    assert found.low < 3.0 < found.high
    assert found.size == pytest.approx(3.0, abs=0.4)
    # Noise alone makes the mean of few seeds long; that is not bias.
    plain = [np.linalg.norm(generator.normal(size=(4, 50)).mean(axis=0)) for _ in range(50)]
    taken_out = [bias(generator.normal(size=(4, 50))).size for _ in range(50)]
    assert np.mean(plain) > 3.0
    assert np.mean(taken_out) < 1.5


def effect_of(low, high, seeds=5):
    return Effect((low + high) / 2, low, high, seeds)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (effect_of(0.1, 0.3), "yes"),
        (effect_of(-0.3, -0.1), "it hurts"),
        (effect_of(-0.01, 0.02), "no difference"),
        (effect_of(-0.01, 0.2), "inconclusive"),
        (effect_of(0.1, 0.3, seeds=2), "inconclusive"),
        (Effect(-math.inf, -math.inf, -math.inf, 5), "it hurts"),
        (Effect(math.nan, math.nan, math.nan, 5), "inconclusive"),
        (None, "inconclusive"),
    ],
)
def test_the_rule_of_helping(found, verdict):
    assert helps(found, little=0.05) == verdict


@pytest.mark.parametrize(
    ("plain", "carried", "verdict"),
    [
        (Bias(1.0, 0.8, 1.2), Bias(0.1, 0.0, 0.2), "yes"),
        (Bias(1.0, 0.8, 1.2), Bias(0.4, 0.3, 0.5), "in part"),
        (Bias(1.0, 0.8, 1.2), Bias(0.9, 0.7, 1.1), "no"),
        (Bias(1.0, 0.8, 1.2), Bias(0.3, 0.0, 1.0), "inconclusive"),
        (Bias(0.1, 0.0, 0.2), Bias(0.1, 0.0, 0.3), "nothing to remove"),
        (Bias(0.1, 0.0, 0.2), Bias(0.5, 0.4, 0.6), "inconclusive"),
        (None, Bias(0.1, 0.0, 0.2), "inconclusive"),
    ],
)
def test_the_rule_of_removing(plain, carried, verdict):
    assert removes(plain, carried) == verdict


def test_the_optimizers_own_bias_is_not_clippings():
    plain, carried = Bias(3.6, 3.5, 3.7), Bias(1.2, 1.1, 1.3)
    assert removes(plain, carried) == "in part"
    assert removes(plain, carried, alone=Bias(1.3, 1.2, 1.4)) == "yes"
    assert removes(Bias(1.3, 1.2, 1.4), carried, alone=Bias(1.3, 1.2, 1.4)) == "nothing to remove"


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (effect_of(0.1, 0.3), "yes"),
        (effect_of(-0.01, 0.01), "yes"),
        (effect_of(-0.04, -0.01), "yes"),  # surely worse, but by nothing that matters
        (effect_of(-0.04, 0.4), "yes"),
        (effect_of(-0.4, -0.1), "no"),
        (effect_of(-0.4, 0.4), "inconclusive"),
        (effect_of(0.1, 0.3, seeds=2), "inconclusive"),
    ],
)
def test_the_rule_of_keeping_up(found, verdict):
    assert keeps_up(found, little=0.05) == verdict


def test_each_method_has_its_best_rate_and_is_compared_with_plain_clipping():
    (block,) = blocks(study())
    assert [row.name for row in block.rows] == list(DISTANCES)
    assert {row.cell.lr for row in block.rows} == {0.3}
    assert block.over(FULL).value == pytest.approx(1.9, abs=0.01)
    assert block.over(GATED, FULL).value == pytest.approx(-0.1, abs=0.02)
    assert block.find(CLIP).bias.size == pytest.approx(3.0, abs=0.05)


def test_a_radius_that_follows_gradients_stands_beside_those_of_the_region():
    (block,) = blocks(study())
    assert block.over(Method(False, radius="Quantile(0.9)")).value == pytest.approx(1.6, abs=0.02)


def test_each_optimizer_is_compared_for_itself():
    slow = {"clip": 3.0, "U-Clip": 4.0}
    both = [study(), study(slow, optimizer="adamw-torch")]
    records = [record for part in both for cell in part.cells for record in cell.records]
    known = [{record.spec.id for cell in part.cells for record in cell.records} for part in both]
    (summary,) = summarise("study", "A study", "small", records, lambda run: both[run in known[1]].epochs(run))
    sgd, adam = blocks(summary)
    assert (sgd.stepped_by, adam.stepped_by) == ("SGD", "AdamW")
    assert sgd.over(FULL).value == pytest.approx(1.9, abs=0.01)
    assert adam.over(FULL).value == pytest.approx(-1.0, abs=0.01)
    lines = tables.parts(summary)["policies"]
    assert [line[2] for line in lines] == ["SGD", "AdamW"]


def test_at_plain_clippings_best_rate_another_one_does_not_help():
    once = study(fates={("U-Clip", 0.3): "diverged"})
    (block,) = blocks(once)
    assert block.find(CLIP).cell.lr == 0.3
    assert block.over(FULL).value == pytest.approx(0.9, abs=0.01)  # at 0.1
    assert block.drop_in(FULL).value == -math.inf
    assert block.drop_in(SHRUNK).value == pytest.approx(1.7, abs=0.01)
    cell = tables.parts(once)["policies"][0][tables.HEADS["policies"].index("U-Clip")]
    assert cell == "▼ came to nothing (+0.899)"


def test_a_larger_batch_is_a_method_of_its_own():
    small, large = study({"clip": 3.0}), study({"clip": 2.5}, batch=32, steps=5)
    both = [record for part in (small, large) for cell in part.cells for record in cell.records]
    (summary,) = summarise(
        "study", "A study", "small", both, lambda run: (small.epochs, large.epochs)[run not in ids](run)
    )
    assert [row.name for row in blocks(summary)[0].rows] == ["clip", "clip, batch × 4"]


ids = {record.spec.id for cell in study({"clip": 3.0}).cells for record in cell.records}


def test_answers_follow_the_numbers():
    found = {answer.question: answer.verdict for answer in answers(study())}
    assert found == {
        answering.SAFE: "yes",
        answering.DROP_IN: "yes",
        answering.BETTER: "yes",
        answering.BIAS: "yes",
        answering.THAN_NONE: "it hurts",
        answering.FULL_BETTER: "yes",
        answering.COST: None,
    }
    assert answers(study(done=False)) == []


def test_a_run_that_diverged_counts_as_the_worst():
    summary = study(fates={("U-Clip", lr): "diverged" for lr in (0.1, 0.3)})
    (block,) = blocks(summary)
    assert block.over(FULL).value == -math.inf
    assert "came to nothing" in {line[4] for line in tables.of_trial(summary).lines}
    once = study(fates={("U-Clip", 0.3): "diverged"})
    assert blocks(once)[0].find(FULL).cell.lr == 0.1


def test_a_study_of_trials_is_shown_as_such():
    summary = study()
    assert [column.header for column in table(summary).columns] == tables.of_trial(summary).heads
    assert len(tables.of_trial(summary).lines) == len(DISTANCES)
    parts = tables.parts(summary)
    first = ["signal", "Skewed noise", "SGD", "norm 0.5"]
    assert all(line[:4] == first for part in parts.values() for line in part)
    assert all(len(line) == len(tables.HEADS[name]) for name, part in parts.items() for line in part)
    (policies,), (radii,), (peers,), (said,) = (parts[name] for name in ("policies", "radii", "peers", "answers"))
    assert policies[tables.HEADS["policies"].index("U-Clip")].startswith("▲ +1.9")
    assert radii[tables.HEADS["radii"].index("clip at Quantile(0.9)")].startswith("▲ +1.59")
    assert peers[tables.HEADS["peers"].index("ZClip + U-Clip")].startswith("▲ +0.99")
    assert said[4:] == ["yes", "yes", "yes", "yes", "it hurts", "yes"]
    assert tables.together("answers", [parts, parts]) == [said, said]
    assert set(kind_of(summary).figures) == {"worth", "course", "frozen"}
    assert draw("frozen", summary) is None
    worth = draw("worth", summary)
    by_method = {row["method"]: row for row in worth.rows}
    assert by_method["U-Clip"]["better_by"] == pytest.approx(1.9, abs=0.01)
    assert by_method["clip"]["better_by"] == 0.0
    course = draw("course", summary)
    ends = [row for row in course.rows if row["method"] == "U-Clip"]
    assert [(row["steps"], row["carry"]) for row in ends] == [(10, 2.0), (20, 4.0)]


@pytest.mark.parametrize("width", [80, 100, 300])
def test_no_number_is_cut_on_a_narrow_terminal(width):
    summary = study()
    heads, lines, _ = tables.of_trial(summary)
    console = Console(width=width, file=io.StringIO())
    shown = table(summary, width)
    console.print(shown)
    said = console.file.getvalue()
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= width
    # Every word of every column that is there, and the name of every one that is not.
    columns = [column.header for column in shown.columns]
    kept = [k for k, head in enumerate(heads) if head in columns or k < 2]
    printed = {word.strip(",") for word in re.findall(r"[^\s│]+", said)}
    assert {word.strip(",") for line in lines for k in kept for word in line[k].split()} <= printed
    left_out = [heads[k] for k in range(len(heads)) if k not in kept]
    assert bool(left_out) == (width == 80)
    assert all(head in " ".join(said.split()) for head in left_out)


def test_what_else_was_measured_stands_in_the_table():
    given = {"task": "bandit", "optimizer": "sgd", "batch": 8, "epochs": 1, "steps": 10, "seed": 0, "lr": 0.1}
    spec = Spec.read({**given, "region": "Norm(0.1)"})
    epochs = [Epoch(1, loss=1.0, metrics={"reward": 1.25, "best_arm": 0.75})]
    record = Record(spec, "done", "reached", 1, 1.0, None, {})
    (summary,) = summarise("study", "A study", "small", [record], lambda run: epochs)
    (line,) = tables.of_trial(summary).lines
    assert dict(zip(tables.of_trial(summary).heads, line, strict=True))["chance of the best arm"] == "0.75"


def test_partial_trials_are_drawn_but_not_judged():
    summary = study(done=False)
    assert draw("worth", summary) is None
    assert not any(tables.parts(summary).values())
    assert all(line[4] == "no run done" for line in tables.of_trial(summary).lines)


def test_a_trial_of_which_one_seed_is_done_is_drawn():
    whole = study()
    records = [
        record if record.spec.seed == 0 else Record(record.spec, "waiting", None, None, None, None, {})
        for cell in whole.cells
        for record in cell.records
    ]
    (summary,) = summarise(
        "study", "A study", "small", records, lambda run: whole.epochs(run) if run in begun(records) else []
    )
    assert draw("worth", summary).rows
    assert draw("course", summary).rows
    assert answers(summary) == []


def begun(records):
    return {record.spec.id for record in records if record.state == "done"}


def test_bias_where_nothing_moves():
    records, epochs = [], {}
    for radius, shares in ((0.5, (-0.5, -0.6)), (2.0, (0.0, -0.2))):
        for seed in range(3):
            spec = Spec.read(
                {
                    **GIVEN,
                    "frozen": True,
                    "start": 2.0,
                    "lr": 0.1,
                    "seed": seed,
                    "region": f"Norm({radius})",
                    "carry": "full",
                }
            )
            epochs[spec.id] = [
                Epoch(number, loss=1.0, metrics={"bias_along": 2.0 * share + 0.01 * seed})
                for number, share in enumerate(shares, 1)
            ]
            records.append(Record(spec, "done", "reached", 2, 1.0, None, {}))
    (summary,) = summarise("study", "A study", "small", records, epochs.__getitem__)
    found = stills(summary)
    assert [still.radius for still in found] == [0.25, 1.0]
    assert [still.share.value for still in found] == pytest.approx([-0.545, -0.095])
    assert answers(summary) == []
    assert tables.parts(summary) == {}
    assert [row["bias"] for row in draw("frozen", summary).rows] == pytest.approx([-0.545, -0.095])
