"""One corrupted rank of two: the rule behind the claim, and the figure from numbers of any kind."""

import numpy as np
import pytest

from carryclip_lab.theory_figures import corrupted
from carryclip_lab.theory_figures.study import Scale


@pytest.mark.parametrize(
    ("limited", "cancels", "verdict"),
    [
        ([True, True], [True, True], "holds"),
        ([True, False], [True, True], "holds in part"),
        ([False, False], [True, False], "holds in part"),
        ([False, False], [False, False], "contradicted"),
    ],
)
def test_the_claim_is_judged_by_its_parts(limited, cancels, verdict):
    assert corrupted.verdict(limited, cancels) == verdict


def test_nearer_means_most_seeds_and_the_mean():
    low, high = np.array([1.0, 1.0, 1.0, 1.0, 1.0]), np.array([2.0, 2.0, 2.0, 2.0, 2.0])
    assert corrupted.limits_one_rank(low, high)
    assert not corrupted.limits_one_rank(high, low)
    assert not corrupted.limits_one_rank(np.array([1.0, 1.0, 3.0, 3.0, 3.0]), high)
    assert not corrupted.limits_one_rank(np.array([1.0, 1.0, 1.0, 1.0, 9.0]), high)


def test_figure_caption_and_rows_say_the_same():
    shape = (len(corrupted.METHODS), corrupted.SEEDS, corrupted.STEPS)
    found = {"errors": np.ones(shape), "noise": np.ones(shape)}
    names = list(corrupted.METHODS)
    found["errors"][names.index("clip, then average")] = 0.25
    found["noise"][names.index("average, then clip")] = 0.5
    result = corrupted.present(Scale(), found)
    assert result.claims[0].verdict == "holds in part"
    assert "clip: one bad rank 0.25 before averaging, 1.00 after" in result.claims[0].ours
    assert result.claims[0].ours in result.caption
    assert len(result.rows) == len(names) * corrupted.SEEDS
    assert {row["to_clean_run"] for row in result.rows if row["method"] == "clip, then average"} == {0.25}


@pytest.mark.parametrize("spoil", [False, True])
def test_every_method_trains_and_is_spoiled_by_nothing_else(monkeypatch, spoil):
    """At a small size, which spawned processes would not know of: what they run, in a group of one."""
    import torch
    import torch.distributed as dist

    monkeypatch.setattr(corrupted, "STEPS", 6)
    monkeypatch.setattr(corrupted, "CORRUPTED_SHARE", 0.5)
    data = torch.randn(50, 64), torch.randint(10, (50,))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for order, carry in corrupted.METHODS.values():
            clean = corrupted._train(1, order, carry, False, 0, data)
            other = corrupted._train(1, order, carry, spoil, 0, data)
            assert clean.shape == (6, 650)
            assert np.array_equal(clean, other) != spoil
    finally:
        dist.destroy_process_group()
