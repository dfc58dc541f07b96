"""The study of reinforcement learning: it trains as the example and the published runs did, and runs to a report."""

import json

import pytest
import rl
import torch
from ppo_loop import Agent, train

from carryclip import Norm
from carryclip_lab import grid
from carryclip_lab.analysis.naming import CLIP, FULL, NONE
from carryclip_lab.analysis.summary import summarise
from carryclip_lab.commands.reproduce import main
from carryclip_lab.engine import training
from carryclip_lab.engine.settings import Options
from carryclip_lab.problem import Run
from carryclip_lab.spec import Spec
from carryclip_lab.store.records import Record
from carryclip_lab.task import Place
from carryclip_lab.tasks import _rooms
from carryclip_lab.tasks.ppo import TITLES

STUDIES = ("rl-smoke", "rl-small")


def parts(name):
    study = grid.load(name)
    records = [Record(spec, "waiting", None, None, None, None, {}) for spec in study.specs]
    return summarise(study.name, study.title, study.tier, records, lambda run: [])


def spec_of(steps=64, **change):
    settings = {"environment": "chain", "measured": 100, "steps": steps}
    common = {"task": "ppo", "optimizer": "adam", "lr": 2.5e-3, "batch": 128, "epochs": 1, "seed": 1}
    return Spec.read({**common, **settings, **change})


@pytest.mark.parametrize("name", STUDIES)
def test_studies_have_rare_rewards_an_ordinary_one_and_noise(name):
    found = parts(name)
    assert {part.recipe.environment: part.subject.kind for part in found} == {
        name: kind for name, (_, _, kind) in TITLES.items()
    }
    for part in found:
        labels = [method.words for method in part.methods]
        assert labels[:4] == ["no clipping", "clip", "U-Clip", "Shrunk (default)"]
        if part.recipe.environment != "cartpole":  # which pays 1 a step
            assert labels[4:] == ["rewards clipped", "rewards with carry", "rewards with carry, seen"]
        assert {len(seeds) for cell in part.cells for seeds in cell.runs.values()} == {3 if name == "rl-smoke" else 5}
    for spec in grid.load(name).specs:
        spec.recipe.check(spec, 1)


@pytest.mark.parametrize(
    ("environment", "change", "method"),
    [
        ("chain", {"region": "Norm(0.5)", "carry": "full"}, rl.GRADIENTS["full carry"]),
        ("lake", {"method": "carryclip_lab.rewards:Seen", "discount": 0.95}, rl.REWARDS["with carry, seen"]),
    ],
)
def test_it_trains_as_the_example_does_bit_for_bit(environment, change, method):
    """So that what was measured of the one holds for the other."""
    spec = spec_of(environment=environment, **change)
    run = Run(spec, spec.recipe.problem(spec, Place()))
    run.problem.begin(0)
    for step in range(64):
        run.train(step)
    agent = rl.loop_ppo(rl.SETTINGS[environment], method, 1000, rounds=2)
    for mine, theirs in zip(run.net.parameters(), agent.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.exhaustive
def test_a_published_run_is_a_run_of_the_study():
    """The chain with our default, seed 0; other processors round otherwise."""
    (spec,) = (
        spec
        for spec in grid.load("rl-small").specs
        if (spec.recipe.environment, spec.carry, spec.seed) == ("chain", "Shrunk(memory=100)", 0)
    )
    *_, epoch, _ = training.train(spec)
    assert epoch.metrics == pytest.approx(rl.read()["chain", "default", 0], rel=0.02)


def test_the_small_study_is_as_long_as_the_published_runs():
    for spec in grid.load("rl-small").specs:
        task, (name,) = spec.recipe, [name for name in rl.SETTINGS if name.lower() == spec.recipe.environment]
        setting = rl.SETTINGS[name]
        assert (task.discount, task.steps, task.measured) == (setting.discount, 32 * setting.rounds, 600)
        assert (spec.lr, spec.batch, spec.seed < rl.SEEDS) == (2.5e-3, 128, True)
        assert spec.region in (None, repr(Norm(rl.GRADIENTS["clip 0.5"].radius)))


def test_measuring_leaves_no_trace_in_the_training():
    """Two epochs are what they are whether or not the critic is judged between them, or the run comes from a file."""
    spec = spec_of(32, epochs=2)
    weights = []
    for judged in (False, True):
        run = Run(spec, spec.recipe.problem(spec, Place()))
        for step in range(64):
            if step % 32 == 0:
                run.problem.begin(step)
            run.train(step)
            if judged and step == 40:
                run.problem.measure(run.net)
        weights.append(torch.cat([p.detach().flatten() for p in run.net.parameters()]))
    assert torch.equal(*weights)


def test_a_run_that_goes_on_from_a_checkpoint_is_the_same(tmp_path):
    spec = spec_of(32, epochs=3, region="Norm(0.5)", carry="full")
    whole = [vars(event) | {"seconds": None} for event in training.train(spec)]
    stopped = training.train(spec, tmp_path / "run.pt")
    next(stopped)
    next(stopped)  # the first epoch is saved by now
    stopped.close()
    again = [vars(event) | {"seconds": None} for event in training.train(spec, tmp_path / "run.pt")]
    assert again == whole


def test_weights_that_are_not_finite_end_a_run_as_diverged():
    spec = spec_of(32, epochs=2, lr=1e30)
    *_, end = training.train(spec)
    assert end.outcome == "diverged"


def test_a_plan_can_time_it():
    spec = spec_of()
    timing = spec.recipe.timing(spec, Place())
    timing.step()
    timing.evaluate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 100}, "batch must divide the first"),
        ({"steps": 40}, r"steps be a multiple of 4 \* 1,024 / batch; got batch 128 and steps 40"),
        ({"optimizer": "sgd"}, "is trained with adam"),
    ],
)
def test_rounds_that_would_be_cut_short_are_refused(change, message):
    spec = spec_of(**change)
    with pytest.raises(ValueError, match=message):
        spec.recipe.check(spec, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"environment": "maze"}, "there is no environment 'maze'"), ({"discount": 1.0}, "discount must be a number")],
)
def test_settings_that_cannot_be_meant_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        spec_of(**change)


def test_it_runs_to_a_report(tmp_path):
    only = ["environment=chain", "seed=0,1"]
    given = {"options": Options(workers=1), "store": str(tmp_path / "s.sqlite"), "resume": True}
    assert main(["rl"], tier="smoke", only=only, out=str(tmp_path / "report"), **given) == 0
    told = json.loads((tmp_path / "report" / "claims.json").read_text(encoding="utf-8"))
    trial = told["trials"]["rl-smoke-ppo-chain"]
    names = [line[trial["heads"].index("method")] for line in trial["table"]]
    assert names[:3] == [method.words for method in (NONE, CLIP, FULL)]
    assert {"rewards clipped", "rewards with carry", "rewards with carry, seen"} <= set(names)
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "PPO, chain" in page
    figures = tmp_path / "report" / "figures" / "rl-smoke-ppo-chain"
    assert (figures / "worth.svg").is_file()
    assert not (figures / "course.svg").exists(), "runs of one epoch have no course"


@pytest.mark.parametrize("name", _rooms.MAKE)
def test_rewards_before_clipping_are_known_to_whoever_measures(name):
    envs = _rooms.MAKE[name](3)
    envs.reset(seed=0)
    infos = envs.step(envs.action_space.sample())[4]
    assert infos["expected"].shape == (3,)


def test_the_example_and_the_study_have_the_same_networks():
    spec = spec_of(environment="cartpole")
    mine = spec.recipe.problem(spec, Place()).build(torch.Generator())
    assert [p.shape for p in mine.parameters()] == [p.shape for p in Agent(4, 2).parameters()]
    assert train.__defaults__ is None
    assert (train.__kwdefaults__["epochs"], train.__kwdefaults__["trace"]) == (4, 0.95)
