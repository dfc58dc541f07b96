"""Runs and studies as data: canonical, hashed, and clear about what is wrong with them."""

import dataclasses
import subprocess
import sys
from collections import Counter

import pytest

from carryclip import Gated, Norm
from carryclip_lab import grid
from carryclip_lab.spec import Spec, parse, policy_of
from carryclip_lab.task import load

GIVEN = {"task": "digits", "optimizer": "sgd", "lr": 0.1, "batch": 16, "epochs": 30, "seed": 0}


def test_equal_specs_have_equal_ids_however_they_are_written():
    one = Spec(**GIVEN, region="Norm(0.5)", carry="Gated()")
    other = Spec(**{**GIVEN, "lr": 1e-1}, region="Norm(radius = 0.5, over='all')", carry="Gated(cap=100)")
    assert one == other
    assert one.id == other.id
    assert Spec.read(one.values).id == one.id


def test_an_id_changes_with_every_field():
    base = Spec(**GIVEN, region="Norm(0.5)", carry="full")
    changes = {
        "task": "cifar10",
        "optimizer": "adam",
        "lr": 0.2,
        "batch": 17,
        "epochs": 31,
        "seed": 1,
        "region": "Norm(0.25)",
        "carry": "none",
        "examples": 100,
        "target": 0.9,
        "floors": "5:0.2",
        "brief": True,
    }
    ids = {dataclasses.replace(base, **{key: value}).id for key, value in changes.items()}
    own = Spec(**GIVEN, method="module:function").id
    assert len(ids | {base.id, own}) == len(changes) + 2


def test_an_id_is_the_same_in_another_process():
    code = f"from carryclip_lab.spec import Spec; print(Spec(**{GIVEN!r}).id)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == Spec(**GIVEN).id


def test_ids_stay_what_they_are():
    """A store knows runs by these: whoever changes them must move the stores."""
    assert Spec(**GIVEN, region="Norm(0.5)", carry="full").id == "d64ca0232733425a"


def test_what_came_later_is_not_written_where_it_is_not_used():
    plain, used = Spec(**GIVEN), Spec(**GIVEN, floors="20:0.4,5: .2", brief=True)
    assert not {"floors", "brief"} & plain.values.keys()
    assert (used.values["floors"], used.values["brief"]) == ("5:0.2, 20:0.4", True)
    assert used.id == Spec(**GIVEN, floors="5:0.2, 20:0.4", brief=True).id
    assert [Spec.from_canonical(spec.canonical) for spec in (plain, used)] == [plain, used]


def test_regions_and_policies_from_text():
    assert parse("Norm(0.5)") == Norm(0.5)
    assert policy_of("Gated(cap=10)") == Gated(cap=10)
    assert (policy_of("full"), policy_of("none")) == (True, False)


BAD = [
    ({"lr": 0.0}, "lr must be a number above 0"),
    ({"lr": True}, "lr must be a number"),
    ({"batch": 0}, "batch must be a whole number, at least 1"),
    ({"batch": 1.5}, "batch must be a whole number"),
    ({"target": 1.5}, "target must be a number above 0 up to 1"),
    ({"task": "cifar"}, "there is no task 'cifar'; did you mean 'cifar10'"),
    ({"floors": "5"}, "floors must be like '10:0.25, 20:0.4'"),
    ({"floors": [5, 0.2]}, "floors must be like"),
    ({"floors": "5:0.2, 5:0.3"}, "each after another epoch"),
    ({"floors": "5:1.5"}, "accuracies between 0 and 1"),
    ({"brief": 1}, "brief must be true or false"),
    ({"task": "softmax", "brief": True}, "floors and brief are for runs to a target, and softmax has none"),
    ({"optimizer": "adamm"}, "did you mean 'adam'"),
    ({"region": "Norn(0.5)"}, "there is no Norn; did you mean 'Norm'"),
    ({"region": "Norm(-1)"}, "Norm: radius must be above 0"),
    ({"region": "Gated()"}, "region must be a region"),
    ({"region": "__import__('os').system('true')"}, "is no region or policy"),
    ({"region": "Norm(0.5)", "carry": "gated"}, "got 'gated'; did you mean 'Gated()'?"),
    ({"region": "Norm(0.5)", "carry": "ful"}, "carry must be 'none', 'full' or a policy .* did you mean 'full'?"),
    ({"region": "Norm(0.5)", "carry": True}, "got True; did you mean 'full'?"),
    ({"region": "Norm(0.5)", "carry": "x"}, "policies are Capped(...), Leaky(...), Gated()"),
    ({"region": "norm"}, "'norm' is no region or policy: did you mean 'Norm(...)'?"),
    ({"region": "Norm(x)"}, "x is neither a number nor a word"),
    ({"region": 0.5}, "it is written in quotes, such as 'Norm(0.5)'"),
    ({"region": "Norm(0.5)", "carry": "Norm(1.0)"}, "carry must be 'none', 'full' or a policy"),
    ({"carry": "full"}, "no carry without a region"),
    ({"learning_rate": 0.1}, "there is no 'learning_rate'"),
    ({"epoch": 3}, "there is no 'epoch'; did you mean 'epochs'"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_spec_is_told_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")):
        Spec.read({**GIVEN, **change})


def test_a_spec_that_lacks_something_says_what():
    with pytest.raises(ValueError, match="spec lacks batch, seed"):
        Spec.read({key: value for key, value in GIVEN.items() if key not in ("batch", "seed")})


def test_methods_of_ones_own():
    assert load("math:sqrt", "method")(4.0) == 2.0
    for path, message in (
        ("math", "must be 'module:name'"),
        ("nowhere:f", "cannot be loaded"),
        ("math:f", "cannot"),
    ):
        with pytest.raises(ValueError, match=message):
            load(path, "method")


@pytest.mark.parametrize(
    "region", ["Norm(1e999)", "Norm(1j)", "Norm(Norm(1))", "Component((1, 2))", "Adaptive(1e999, 1)", "Norm({1, 2})",
               "Norm(b'x')", "Norm(...)", "Norm(-1)", "Norm('x')", "Adaptive(1, 2, min_radius=1e999)", "Norm(True)",
               "Norm(nan)", "Component(0)", "Adaptive(1, 2, moments=Norm(1))", "Adaptive(1, 2, moments=EWMA(2))"],
)  # fmt: skip
def test_a_region_that_cannot_be_meant_is_refused(region):
    text = f'name = "x"\ntier = "small"\n[[grid]]\nregion = "{region}"\ntask = "digits"\noptimizer = "sgd"\n'
    with pytest.raises(ValueError, match=r"x\.toml, grid 1: "):
        grid.read(f"{text}lr = 0.1\nbatch = 4\nepochs = 2\nseed = 0", "x.toml")


def test_the_papers_study_is_whole():
    study = grid.load("cifar10-paper")
    assert len(study.specs) == len({spec.id for spec in study.specs}) == 30_750
    per_method = Counter((spec.region, spec.carry) for spec in study.specs)
    assert len(per_method) == 41
    assert set(per_method.values()) == {750}
    assert {(spec.batch, spec.epochs) for spec in study.specs} >= {(1, 100), (100, 300), (15_000, 500)}
    assert {spec.lr for spec in study.specs} == {1e-1, 1e-2, 1e-3, 1e-4, 1e-5}


@pytest.mark.parametrize("name", grid.names())
def test_studies_that_ship_can_be_read(name):
    study = grid.load(name)
    assert study.name == name
    assert study.specs


def test_grids_may_overlap_and_tables_follow_a_key():
    text = """
    name = "x"
    tier = "small"
    [defaults]
    task = "digits"
    optimizer = "sgd"
    lr = [0.1, 0.01]
    seed = 0
    epochs = { by = "batch", 4 = 10, 8 = 20 }
    [[grid]]
    batch = [4, 8]
    [[grid]]
    batch = 4
    """
    specs = grid.read(text, "x.toml").specs
    assert [(spec.lr, spec.batch, spec.epochs) for spec in specs] == [
        (0.1, 4, 10),
        (0.1, 8, 20),
        (0.01, 4, 10),
        (0.01, 8, 20),
    ]


BAD_STUDIES = [
    ("name = 1 2", "is no TOML"),
    ('name = "x"\ntier = "small"\ngrids = []', "there is no 'grids'; did you mean 'grid'"),
    ('name = "x"\ngrid = []', "lacks 'tier'"),
    ('name = "x"\ntier = "big"\ngrid = []', "tier must be"),
    (
        'name = "x"\ntier = "small"\n[defaults]\nbatchsize = 3\n[[grid]]',
        "defaults: there is no 'batchsize'; did you mean 'batch'",
    ),
    ('name = "x"\ntier = "small"\n[[grid]]\nlr = []', "grid 1: lr is an empty list"),
    ('name = "x"\ntier = "small"\n[[grid]]\nbatch = 4\nepochs = { 4 = 1 }', "needs by = the key"),
    ('name = "x"\ntier = "small"\n[[grid]]\nbatch = 4\nepochs = { by = "batch", 8 = 1 }', "no value for batch = 4"),
    ('name = "x"\ntier = "small"\n[[grid]]\nbatch = 4', "grid 1 lacks task"),
]


@pytest.mark.parametrize(("text", "message"), BAD_STUDIES)
def test_a_bad_study_is_told_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        grid.read(text, "x.toml")


def test_an_unknown_study_is_told_which_there_are(tmp_path):
    with pytest.raises(ValueError, match="there are cifar10-claims"):
        grid.load("cifar")
    with pytest.raises(ValueError, match="There is no study file"):
        grid.load(tmp_path / "mine.toml")
