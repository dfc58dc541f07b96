"""Whether a method is faster, or only wants another learning rate."""

import math

import pytest

from carryclip_lab.analysis.shifts import answer, drop_in, of_rates, shifts
from made import METHODS, seeds, summary

ALONE = {1e-4: 24.0, 2e-4: 14.0, 5e-4: 9.0, 1e-3: 12.0}
SHIFTED = {1e-4: 9.0, 2e-4: 12.0, 5e-4: math.inf}


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (SHIFTED, ALONE, "a shift of the learning rate, not a speed-up"),
        ({1e-4: 6.0, 2e-4: 12.0}, ALONE, "a speed-up"),
        ({1e-4: 8.0}, ALONE, "a shift of the learning rate, not a speed-up"),  # one epoch less is chance
        ({1e-4: 95.0}, {1e-4: 99.0}, "neither a speed-up nor a shift"),  # and so is a twentieth
        ({1e-4: 90.0}, {1e-4: 99.0}, "a speed-up"),
        ({5e-4: 9.0, 1e-3: 15.0}, ALONE, "neither a speed-up nor a shift"),
        ({1e-4: math.inf}, ALONE, "neither a speed-up nor a shift"),
        ({1e-4: 30.0}, {1e-4: math.inf}, "a speed-up"),
        ({1e-4: math.inf}, {1e-4: math.inf}, "open"),
        (SHIFTED, {}, "open"),
        ({}, ALONE, "open"),
    ],
)
def test_a_speed_up_or_a_shift(ours, theirs, said):
    assert answer(ours, theirs) == said


def adam(epochs, **given):
    return [run for lr, needed in epochs.items() for run in seeds(*needed, optimizer="adam", lr=lr, **given)]


def test_it_is_told_in_a_sentence_with_what_is_left():
    records = adam({1e-4: (24,), 5e-4: (9,), 1e-3: (12,)}) + adam({1e-4: (9,), 5e-4: (math.inf,)}, **METHODS["U-Clip"])
    (shift,) = shifts(summary(records))
    assert str(shift) == (
        "Adam, batch 50: epochs at 0.0001 U-Clip 9, alone 24; at 0.0005 U-Clip does not arrive, alone 9; "
        "best: U-Clip 9 (at 0.0001, the edge of what has run), alone 9 (at 0.0005). "
        "By this a shift of the learning rate, not a speed-up, with one seed"
    )
    more = adam({1e-4: (None,), 2e-4: (12, None, None)}, **METHODS["U-Clip"])
    (shift,) = shifts(summary(records[:3] + more))
    assert str(shift).endswith(
        "By this neither a speed-up nor a shift, so far (not run yet: U-Clip 0.0001, U-Clip 0.0002 (2 of 3 seeds)), "
        "with one seed"
    )
    (shift,) = shifts(summary(records[:3] + more[:1]))
    assert (str(shift), shift.answer) == ("Adam, batch 50: U-Clip has not run yet", "open")


def test_the_table_by_rate_names_what_is_left():
    records = adam({1e-4: (24,), 5e-4: (9, 10, 12)}) + adam({1e-4: (9,), 2e-4: (None,)}, **METHODS["U-Clip"])
    assert of_rates(summary(records + adam({1e-4: (None,)}, **METHODS["clip"]))).lines == [
        ["Adam", "50", "none", "0.0001: 24, 0.0005: 10", "none"],
        ["Adam", "50", "U-Clip, norm 0.5", "0.0001: 9", "0.0002"],
    ]


def test_the_default_in_plain_clippings_place_is_told_seed_by_seed():
    records = adam({5e-4: (17, 18, None), 2e-4: (18,)}, **METHODS["clip"])
    records += adam({5e-4: (24, math.inf, 22), 1e-3: (20,)}, region="Norm(0.5)", carry="Shrunk()")
    said = "Adam, batch 50, rate 0.0005: the default 24, does not arrive, plain clipping 17, 18 (2 seeds)"
    assert drop_in(summary(records)) == [said]
