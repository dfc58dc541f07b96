"""The rules by which the paper's claims about CIFAR-10 are judged, and what they are given to judge."""

import math

import pytest

from carryclip_lab.analysis import verdicts
from carryclip_lab.analysis.compare import Effect
from carryclip_lab.analysis.judge import QUESTIONS, judge
from made import METHODS, seeds, summary

FASTER, SLOWER, CROSSING = Effect(0.7, 0.6, 0.8, 5), Effect(1.4, 1.2, 1.6, 5), Effect(0.95, 0.8, 1.1, 5)
FEW = Effect(0.7, 0.6, 0.8, 2)


# ---------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("effects", "verdict"),
    [
        ([FASTER, FASTER], "holds"),
        ([FASTER, CROSSING], "holds in part"),
        ([FASTER, SLOWER], "holds in part"),
        ([SLOWER, CROSSING], "contradicted"),
        ([CROSSING, CROSSING], "inconclusive"),
        ([FASTER, FEW], "inconclusive"),
        ([], "inconclusive"),
    ],
)
def test_speeding_up(effects, verdict):
    assert verdicts.speeds_up(effects) == verdict


@pytest.mark.parametrize(
    ("effect", "verdict"),
    [
        (FASTER, "holds"),
        (Effect(0.9, 0.85, 0.95, 5), "holds in part"),
        (CROSSING, "inconclusive"),
        (FEW, "inconclusive"),
        (SLOWER, "contradicted"),
    ],
)
def test_speeding_up_clearly(effect, verdict):
    assert verdicts.clearly_speeds_up(effect) == verdict


@pytest.mark.parametrize(
    ("slowed", "cells", "seeds", "verdict"),
    [
        (1, 10, 5, "holds"),
        (3, 10, 5, "holds in part"),
        (4, 10, 5, "contradicted"),
        (0, 10, 2, "inconclusive"),
        (0, 0, 5, "inconclusive"),
    ],
)
def test_slowing_rarely(slowed, cells, seeds, verdict):
    assert verdicts.rarely_slows(slowed, cells, seeds) == verdict


@pytest.mark.parametrize(
    ("harmed", "cells", "seeds", "verdict"),
    [
        (5, 10, 5, "holds"),
        (3, 10, 5, "holds in part"),
        (2, 10, 5, "contradicted"),
        (9, 10, 2, "inconclusive"),
        (0, 0, 5, "inconclusive"),
    ],
)
def test_harming_often(harmed, cells, seeds, verdict):
    assert verdicts.often_harms(harmed, cells, seeds) == verdict


LITTLE, MUCH = Effect(1.0, 0.97, 1.05, 5), Effect(0.7, 0.6, 0.8, 5)


@pytest.mark.parametrize(
    ("gain", "carry", "reached", "verdict"),
    [
        (LITTLE, FASTER, 0, "holds"),
        (LITTLE, FASTER, 3, "holds in part"),
        (MUCH, CROSSING, 0, "holds in part"),
        (MUCH, SLOWER, 3, "contradicted"),
        (CROSSING, CROSSING, 3, "contradicted"),
        (LITTLE, FEW, 0, "inconclusive"),
    ],
)
def test_adding_little(gain, carry, reached, verdict):
    assert verdicts.adds_little(gain, carry, reached) == verdict


@pytest.mark.parametrize(
    ("effect", "faster", "verdict"),
    [
        (LITTLE, 1, "holds"),
        (SLOWER, 0, "holds"),
        (LITTLE, 4, "holds in part"),
        (CROSSING, 0, "inconclusive"),
        (FEW, 0, "inconclusive"),
        (MUCH, 9, "contradicted"),
    ],
)
def test_no_benefit(effect, faster, verdict):
    assert verdicts.no_benefit(effect, faster, 10) == verdict


# ---------------------------------------------------------------------- from runs to claims

SPEEDS = {"none": 1.0, "clip": 0.8, "U-Clip": 0.6}
ADAPTIVE = ("Adaptive(2, 0)", "Adaptive(1, 2)", "Adaptive(1, 2, moments=EWMA(0.95))")


def runs(count=3, *, optimizers=("sgd", "momentum", "adam"), batches=(5, 50, 500), speeds=SPEEDS, **given):
    """A small study: each method needs its share of the optimizer's own epochs, U-Clip twice as many at batch 500."""
    found = []
    for optimizer in optimizers:
        for batch in batches:
            for method, setting in METHODS.items():
                factor = 2.0 if method == "U-Clip" and batch >= 500 else speeds[method]
                needed = [factor * (100 + 10 * seed) for seed in range(count)]
                found += seeds(*needed, optimizer=optimizer, batch=batch, **setting, **given)
    return found


def adaptive(optimizer, factors, count=3, **given):
    """Adaptive regions: (clip, U-Clip) as shares of the optimizer's own epochs."""
    found = seeds(*[100 + 10 * seed for seed in range(count)], optimizer=optimizer, **given)
    for region in ADAPTIVE:
        for carry, factor in zip(("none", "full"), factors, strict=True):
            never = region == "Adaptive(2, 0)" and carry == "full"
            needed = [math.inf if never else factor * (100 + 10 * seed) for seed in range(count)]
            found += seeds(*needed, optimizer=optimizer, region=region, carry=carry, **given)
    return found


def judged(records, **given):
    return {claim.id: claim for claim in judge(summary(records, **given))}


def test_a_small_study_judges_what_it_can():
    claims = judged(runs())
    assert {name: claim.verdict for name, claim in claims.items()} == {
        "C1": "holds",
        "C2": "holds",
        "C3": "holds",
        "C4": "holds",
        **dict.fromkeys(("C5", "C6", "C7", "C8"), "not run at this size"),
    }
    assert list(claims) == list(QUESTIONS)
    assert "SGD U-Clip 0.60 [0.60, 0.60]" in claims["C1"].ours
    assert "batch 5, 50" in claims["C1"].ours
    assert "3 of 3 cells with batch ≥ 500" in claims["C4"].ours
    assert (claims["C1"].tier, claims["C1"].seeds, claims["C1"].command) == ("small", 3, "carryclip reproduce study")
    assert claims["C5"].ours == ""


@pytest.mark.parametrize(
    ("speeds", "first", "second"),
    [
        ({"none": 1.0, "clip": 1.5, "U-Clip": 1.5}, "contradicted", "contradicted"),
        ({"none": 1.0, "clip": 1.5, "U-Clip": 0.9}, "holds in part", "holds in part"),
        ({"none": 1.0, "clip": 1.0, "U-Clip": 1.0}, "inconclusive", "inconclusive"),
        ({"none": 1.0, "clip": math.inf, "U-Clip": math.inf}, "contradicted", "contradicted"),
        ({"none": math.inf, "clip": 0.5, "U-Clip": 0.5}, "holds", "holds"),
        ({"none": math.inf, "clip": math.inf, "U-Clip": math.inf}, "inconclusive", "inconclusive"),
    ],
)
def test_verdicts_follow_the_data(speeds, first, second):
    claims = judged(runs(batches=(5, 50), speeds=speeds))
    assert (claims["C1"].verdict, claims["C2"].verdict) == (first, second)


def test_one_seed_has_no_interval():
    claim = judged(runs(1))["C2"]
    assert claim.verdict == "inconclusive"
    assert "Adam U-Clip 0.60 (one seed) (95 % intervals)" not in claim.ours
    assert "Adam U-Clip 0.60 (one seed)" in claim.ours


def test_two_seeds_are_too_few():
    claims = judged(runs(2))
    assert {claims[name].verdict for name in ("C1", "C2", "C3", "C4")} == {"inconclusive"}


def test_runs_that_are_not_done_leave_it_open():
    records = runs()
    records[0] = seeds(None, optimizer="sgd", batch=5)[0]
    claims = judged(records)
    assert claims["C1"].verdict == "inconclusive"
    assert claims["C1"].ours.endswith("so far 35 of 36 runs (left: SGD, batch 5: 1 none)")
    assert claims["C2"].verdict == "holds"  # Adam's are all there


def test_before_its_first_run_a_claim_says_so():
    planned = [*seeds(None, None, optimizer="adam"), *seeds(None, None, optimizer="adam", **METHODS["U-Clip"])]
    claim = judged(planned)["C2"]
    assert (claim.verdict, claim.ours) == ("not run at this size", "CIFAR-10: none of 4 runs is done")
    waiting = [*seeds(None, batch=500), *seeds(8, 9, 9, batch=500, **METHODS["U-Clip"])]
    claim = judged(waiting)["C4"]
    told = "CIFAR-10: nothing to compare yet; so far 3 of 4 runs (left: SGD, batch 500: 1 none)"
    assert (claim.verdict, claim.ours) == ("inconclusive", told)


def test_a_part_of_the_images_is_another_size():
    claims = judged(runs(examples=2000))
    assert {claim.verdict for claim in claims.values()} == {"not run at this size"}
    assert claims["C2"].ours.startswith("CIFAR-10, 2,000 examples of 50,000, another size than the paper's: epochs")
    whole = judged(runs(examples=50_000))["C2"]
    assert (whole.verdict, "another size" in whole.ours) == ("holds", False)


def test_a_claim_needs_its_cells():
    assert judged(runs(optimizers=("sgd", "adam")))["C1"].verdict == "not run at this size"
    assert judged(runs(batches=(500,)))["C2"].verdict == "not run at this size"
    assert judged(runs(batches=(5,)))["C4"].verdict == "not run at this size"
    assert judged([record for record in runs() if record.spec.region])["C1"].verdict == "not run at this size"


@pytest.mark.parametrize("given", [{"tier": "smoke"}, {"task": "digits"}])
def test_the_smoke_tier_shows_numbers_but_no_verdict(given):
    task = {"task": given.pop("task")} if "task" in given else {}
    claim = judged(runs(**task), **given)["C1"]
    assert claim.verdict == "not run at this size"
    assert "0.60" in claim.ours


def test_slowed_cells_are_counted_for_small_batches_only():
    slow = {"none": 1.0, "clip": 1.0, "U-Clip": 1.2}
    claims = judged(runs(batches=(5, 50, 100, 500), speeds=slow))
    assert claims["C3"].verdict == "contradicted"
    assert "9 of 9 cells" in claims["C3"].ours


def test_missing_the_target_more_often_is_harm_too():
    records = []
    for optimizer in ("sgd", "adam"):
        records += seeds(100, 101, 102, optimizer=optimizer, batch=500)
        records += seeds(100, 101, math.inf, optimizer=optimizer, batch=500, **METHODS["U-Clip"])
    claim = judged(records)["C4"]
    assert claim.verdict == "holds"
    assert "slower (ratio above 1.05) in 0 of 2" in claim.ours
    assert "more seeds in 2" in claim.ours
    assert "U-Clip 33 %, alone 0 %" in claim.ours


@pytest.mark.parametrize(("small", "verdict"), [(0.6, "holds"), (1.5, "contradicted"), (1.0, "inconclusive")])
def test_small_radii_are_judged_and_all_are_told(small, verdict):
    records = seeds(100, 110, 120, batch=5)
    for radius, factor in ((0.25, small), (0.5, small), (10.0, 1.0)):
        needed = [factor * (100 + 10 * seed) for seed in range(3)]
        records += seeds(*needed, batch=5, region=f"Norm({radius})", carry="full")
    claim = judged(records, tier="paper")["C5"]
    assert claim.verdict == verdict
    assert "radius 10: 1.00" in claim.ours


@pytest.mark.parametrize(
    ("factors", "verdict"), [((1.2, 1.1), "holds"), ((0.6, 0.5), "holds in part"), ((1.0, 1.2), "holds in part")]
)
def test_adaptive_regions_with_sgd(factors, verdict):
    claim = judged(adaptive("sgd", factors), tier="paper")["C6"]
    assert claim.verdict == verdict
    assert "reached the target in 0 of 3 runs" in claim.ours


@pytest.mark.parametrize(("optimizer", "name"), [("momentum", "C7"), ("adam", "C8")])
@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "holds"), (0.7, "contradicted"), (0.95, "inconclusive")])
def test_adaptive_regions_with_momentum_and_adam(optimizer, name, factor, verdict):
    records = [
        record
        for record in adaptive(optimizer, (1.0, factor))
        if not (record.spec.carry == "full" and "mean=2" in record.spec.region)
    ]
    assert judged(records, tier="paper")[name].verdict == verdict


def test_a_region_unlike_the_papers_is_not_its_evidence():
    records = seeds(100, 101, 102, optimizer="adam")
    records += seeds(50, 51, 52, optimizer="adam", region="Adaptive(1, 2, include_current=True)", carry="full")
    assert judged(records, tier="paper")["C8"].verdict == "not run at this size"
