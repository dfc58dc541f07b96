"""``RewardCarry`` and ``RewardCarryByKey``: trajectories side by side, saving, and bad input."""

import json
import math

import numpy as np
import pytest

from carryclip import CarryClipWarning
from carryclip.rewards import RewardCarry, RewardCarryByKey


def test_trajectories_do_not_pay_for_each_other():
    rng = np.random.default_rng(0)
    rewards, ends = 3 * rng.standard_normal((40, 5)), rng.random((40, 5)) < 0.1
    together = RewardCarry(1.0, 5)
    found = np.array([together.step(r, e) for r, e in zip(rewards, ends, strict=True)])
    for i in range(5):
        alone = RewardCarry(1.0)
        expected = [alone.step([r], [e])[0] for r, e in zip(rewards[:, i], ends[:, i], strict=True)]
        assert found[:, i].tolist() == expected


def test_inside_the_radius_nothing_changes():
    carry = RewardCarry(1.0, 3)
    rewards = np.array([0.3, -1.0, 1.0])
    assert carry.step(rewards, np.array([False, False, True])).tolist() == rewards.tolist()
    assert not carry.carry.any()


def test_the_type_of_the_rewards_is_kept_and_rounding_is_carried():
    carry = RewardCarry(0.1)
    paid = [carry.step(np.array([0.3], np.float32), np.array([t == 9])) for t in range(10)]
    assert {each.dtype for each in paid} == {np.dtype(np.float32)}
    assert float(np.sum(paid, dtype=np.float64)) == pytest.approx(10 * float(np.float32(0.3)), abs=1e-6)
    assert RewardCarry(1.0).step(np.array([3]), [False]).dtype == np.float64


def test_without_a_flush_the_rest_is_forgotten_and_counted():
    carry = RewardCarry(1.0, flush=False)
    assert carry.step([5.0], [True]).tolist() == [1.0]
    assert (carry.carry[0], carry.dropped[0]) == (0.0, 4.0)


def test_interest_that_cannot_be_paid_is_capped_said_once_and_counted():
    carry = RewardCarry(1.0, discount=0.9)
    assert carry.cap == pytest.approx(5.0)
    with pytest.warns(CarryClipWarning, match="exceeded the cap of 5"):
        carry.step([10.0], [False])
    assert carry.carry[0] == pytest.approx(5.0)
    assert carry.dropped[0] == pytest.approx(5.0)
    carry.step([10.0], [False])  # filterwarnings would turn a second warning into an error
    for _ in range(12):  # with nothing coming in, a carry at the cap is paid off
        carry.step([0.0], [False])
    assert carry.carry[0] == 0


def test_a_cap_whose_interest_exceeds_the_radius_is_refused():
    with pytest.raises(ValueError, match=r"cap must be below radius/\(1 - discount\) = 10"):
        RewardCarry(1.0, discount=0.9, cap=10.0)


def test_an_abandoned_episode_owes_nothing_to_the_next():
    carry = RewardCarry(1.0, 2)
    carry.step([4.0, 6.0], [False, False])
    carry.reset(np.array([True, False]))
    assert carry.carry.tolist() == [0.0, 5.0]
    assert carry.dropped.tolist() == [3.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused_and_change_nothing(bad):
    carry = RewardCarry(1.0, 3)
    carry.step([4.0, 0.0, 0.0], [False] * 3)
    with pytest.raises(ValueError, match="environment 1 is "):
        carry.step([0.0, bad, 0.0], [False] * 3)
    assert carry.carry.tolist() == [3.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="'left' is "):
        RewardCarryByKey(1.0).step("left", bad)


@pytest.mark.parametrize(
    ("rewards", "ended", "error", "says"),
    [
        ([1.0], [False, False], ValueError, "expected 2 rewards and 2 flags"),
        ([1.0, 2.0, 3.0], [False] * 3, ValueError, "Pass num_envs=3"),
        ([1.0, 2.0], [0, 1], TypeError, "array of bool"),
        (["a", "b"], [False, False], TypeError, "real numbers"),
    ],
)
def test_bad_steps(rewards, ended, error, says):
    with pytest.raises(error, match=says):
        RewardCarry(1.0, 2).step(rewards, ended)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"radius": 0.0}, "radius must be above 0"),
        ({"radius": math.inf}, "radius must be above 0 and finite"),
        ({"radius": 1.0, "discount": 1.5}, "discount must be in"),
        ({"radius": 1.0, "num_envs": 0}, "num_envs must be a whole number"),
        ({"radius": 1.0, "cap": -1.0}, "cap must be above 0"),
    ],
)
def test_bad_settings(given, says):
    with pytest.raises(ValueError, match=says):
        RewardCarry(**given)


@pytest.mark.parametrize("discount", [1.0, 0.95])
def test_a_saved_carry_goes_on_bit_for_bit(discount):
    rng = np.random.default_rng(1)
    rewards = 2 * rng.standard_normal((30, 2))
    whole, first, second = (RewardCarry(1.5, 2, discount=discount) for _ in range(3))
    expected = [whole.step(row, np.array([False, False])).tolist() for row in rewards]
    found = [first.step(row, np.array([False, False])).tolist() for row in rewards[:13]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [second.step(row, np.array([False, False])).tolist() for row in rewards[13:]]
    assert found == expected
    assert second.dropped.tolist() == whole.dropped.tolist()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"radius": 2.0}, "saved with radius=2.0, this one has radius=1.0"),
        ({"discount": 0.9}, "saved with discount=0.9"),
        ({"num_envs": 3}, "is for 3 trajectories, this one has 2"),
        ({"flush": False}, "saved with flush=False"),
    ],
)
def test_a_state_of_other_settings_is_refused(given, says):
    state = RewardCarry(**({"radius": 1.0, "num_envs": 2} | given)).state_dict()
    with pytest.raises(ValueError, match=says):
        RewardCarry(1.0, 2).load_state_dict(state)


def test_a_state_that_is_none_is_refused():
    with pytest.raises(ValueError, match="a state has the entries"):
        RewardCarry(1.0).load_state_dict({"carry": [0.0]})
    broken = RewardCarry(1.0).state_dict() | {"carry": [math.nan]}
    with pytest.raises(ValueError, match="not finite"):
        RewardCarry(1.0).load_state_dict(broken)


def test_carries_by_key_are_saved_and_restored():
    first, second = RewardCarryByKey(1.0), RewardCarryByKey(1.0)
    first.step((0, "up"), 3.0)
    second.load_state_dict(first.state_dict())
    assert second.step((0, "up"), 0.0) == 1.0
    assert first.carry[0, "up"] == 2.0, "a copy"
    with pytest.raises(ValueError, match=r"saved with radius=1\.0"):
        RewardCarryByKey(2.0).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="entries radius and carry"):
        second.load_state_dict({})
