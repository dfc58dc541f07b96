"""What was proved of carried rewards, on the shipped code."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from carryclip.rewards import RewardCarry, RewardCarryByKey


def clipped(rewards, carry):
    """The rewards of one episode, clipped."""
    last = len(rewards) - 1
    return np.array([carry.step([r], [t == last])[0] for t, r in enumerate(rewards)])


def discounted(rewards, discount):
    return float(np.sum(np.asarray(rewards) * discount ** np.arange(len(rewards))))


episodes = st.lists(st.floats(-5, 5), min_size=1, max_size=60)


@given(rewards=episodes, radius=st.floats(0.1, 10), discount=st.sampled_from([1.0, 0.99, 0.9]))
def test_the_return_is_exact(rewards, radius, discount):
    assume(not_beyond(rewards, radius, discount))
    carry = RewardCarry(radius, discount=discount, cap=np.inf if discount == 1 else 0.999 * radius / (1 - discount))
    paid = clipped(rewards, carry)
    assert all(abs(u) <= radius for u in paid[:-1])
    assert carry.dropped[0] == 0
    scale = max(1.0, float(np.abs(rewards).sum()))
    assert discounted(paid, discount) == pytest.approx(discounted(rewards, discount), abs=1e-12 * scale)


def not_beyond(rewards, radius, discount):
    """Whether the carry stays below its cap, worked out apart from the code under test."""
    owed = 0.0
    for r in rewards[:-1]:
        owed = np.sign(owed + r) * max(0.0, abs(owed + r) - radius) / discount
        if discount < 1 and abs(owed) > 0.999 * radius / (1 - discount):
            return False
    return True


def test_the_discounted_return_is_exact_over_a_long_episode():
    rng = np.random.default_rng(0)
    rewards = 0.2 + 2.0 * rng.standard_normal(400)
    carry = RewardCarry(3.0, discount=0.95)
    paid = clipped(rewards, carry)
    assert carry.dropped[0] == 0
    assert (np.abs(paid) < np.abs(rewards).max()).any()
    assert discounted(paid, 0.95) == pytest.approx(discounted(rewards, 0.95), abs=1e-12)


def test_the_return_from_each_step_on_is_larger_by_the_carry():
    rng = np.random.default_rng(1)
    rewards, discount = 10.0 * (rng.random(50) < 0.1), 0.99
    carry = RewardCarry(1.0, discount=discount)
    paid, owed = [], []
    for t, reward in enumerate(rewards):
        owed.append(carry.carry[0])
        paid.append(carry.step([reward], [t == 49])[0])
    assert max(owed) > 5
    for t in range(50):
        assert discounted(paid[t:], discount) == pytest.approx(discounted(rewards[t:], discount) + owed[t], abs=1e-12)


def test_a_carry_without_discount_changes_a_discounted_return_by_its_formula():
    rng = np.random.default_rng(2)
    rewards, discount, carry = 2.0 * rng.standard_normal(400) + 0.2, 0.95, RewardCarry(1.0)
    paid, owed = [], []
    for t, reward in enumerate(rewards):
        owed.append(carry.carry[0])
        paid.append(carry.step([reward], [t == 399])[0])
    expected = -(1 - discount) * sum(discount ** (t - 1) * owed[t] for t in range(1, 400))
    found = discounted(paid, discount) - discounted(rewards, discount)
    assert found == pytest.approx(expected, abs=1e-11)
    assert abs(found) > 0.01
    assert abs(found) <= np.abs(owed).max()


def policy_gradients(how, episodes=400_000, horizon=6, radius=1.3):
    """REINFORCE's estimates: action 1 pays 8 with probability 0.15, action 0 pays 1, and both more after action 1."""
    rng = np.random.default_rng(3)
    p = 1 / (1 + np.exp(-0.3))
    actions = (rng.random((horizon, episodes)) < p).astype(float)
    before = np.vstack([np.zeros(episodes), actions[:-1]])
    rewards = np.where(actions == 1, 8.0 * (rng.random((horizon, episodes)) < 0.15), 1.0) * (1 + 0.2 * before)
    if how == "plain":
        rewards = np.clip(rewards, -radius, radius)
    elif how != "raw":
        carry = RewardCarry(radius, episodes, flush=how == "flush")
        rewards = np.array([carry.step(row, np.full(episodes, t == horizon - 1)) for t, row in enumerate(rewards)])
    later = np.cumsum(rewards[::-1], axis=0)[::-1]
    return ((actions - p) * later).sum(0)


def test_policy_gradients_stay_unbiased_where_plain_clipping_is_far_off():
    found = {how: policy_gradients(how) for how in ("raw", "flush", "no flush", "plain")}
    raw = found["raw"]
    # All four saw the same episodes, so the difference of two estimates has a standard error of its own.
    off = {
        how: abs((x - raw).mean()) / ((x - raw).std() / np.sqrt(len(raw))) for how, x in found.items() if how != "raw"
    }
    assert off["flush"] < 3
    assert off["plain"] > 20
    assert off["no flush"] > 20
    assert found["plain"].mean() < 0 < raw.mean(), "plain clipping even turns the gradient around"


def bandit(carry_of):
    """Estimated means of two arms: arm 0 pays 10 with probability 0.1, arm 1 pays 0.5. Arms are tried at random."""
    rng = np.random.default_rng(4)
    carries, estimates, visits = RewardCarryByKey(1.2), np.zeros(2), np.zeros(2)
    for _ in range(100_000):
        arm = int(rng.integers(2))
        reward = (10.0 if rng.random() < 0.1 else 0.0) if arm == 0 else 0.5
        paid = float(np.clip(reward, -1.2, 1.2)) if carry_of is None else carries.step(carry_of(arm), reward)
        visits[arm] += 1
        estimates[arm] += (paid - estimates[arm]) / visits[arm]
    return estimates


def test_one_carry_for_all_arms_reverses_their_order():
    shared, own, plain = bandit(lambda arm: "all"), bandit(lambda arm: arm), bandit(None)
    assert shared[0] < shared[1] - 0.1, "the worse arm looks better"
    assert plain[0] == pytest.approx(0.12, abs=0.02)
    np.testing.assert_allclose(own, [1.0, 0.5], atol=0.06)  # the mean of 50,000 draws has a deviation of 0.013


STATES, ACTIONS, DISCOUNT = 4, 2, 0.9


def world():
    """Transitions, mean rewards, and rewards with rare large parts, of a small Markov decision process."""
    rng = np.random.default_rng(13)
    moves = rng.dirichlet(np.ones(STATES), size=(STATES, ACTIONS))
    means = rng.uniform(-0.5, 0.8, (STATES, ACTIONS))
    large = rng.uniform(3, 12, (STATES, ACTIONS))
    rare = rng.uniform(0.03, 0.15, (STATES, ACTIONS))
    return moves, means, large, rare


def q_learning(key, steps=200_000):
    """The table after ``steps``; ``key`` says which carry pays, None clips plainly."""
    moves, means, large, rare = world()
    ladder = np.cumsum(moves, axis=2).tolist()
    rng = np.random.default_rng(5)
    draws = rng.random((steps, 3)).tolist()
    carries = RewardCarryByKey(1.0)
    table = [[0.0] * ACTIONS for _ in range(STATES)]
    visits = [[0] * ACTIONS for _ in range(STATES)]
    state = 0
    for first, second, third in draws:
        action = int(first < 0.5)
        reward = means[state, action] + large[state, action] * ((second < rare[state, action]) - rare[state, action])
        paid = max(-1.0, min(1.0, reward)) if key is None else carries.step(key(state, action), float(reward))
        after = next((s for s in range(STATES) if third < ladder[state][action][s]), STATES - 1)
        visits[state][action] += 1
        rate = visits[state][action] ** -0.7
        table[state][action] += rate * (paid + DISCOUNT * max(table[after]) - table[state][action])
        state = after
    return np.array(table)


def test_q_learning_converges_with_a_carry_for_each_state_and_action():
    moves, means, _, _ = world()
    best = np.zeros((STATES, ACTIONS))
    for _ in range(1000):
        best = means + DISCOUNT * moves @ best.max(1)
    own = np.abs(q_learning(lambda state, action: (state, action)) - best).max()
    plain = np.abs(q_learning(None) - best).max()
    assert own < 0.3
    assert plain > 3.0
