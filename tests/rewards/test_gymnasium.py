"""The Gymnasium wrappers: Gymnasium's own checker, every way to reset, loading in mid-episode, and bad input."""

import copy
import math
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList

from carryclip.integrations.gymnasium import ClipRewardWithCarry, VectorClipRewardWithCarry


class Script(gymnasium.Env):
    """Pays what it was told, then terminates, or is cut off."""

    observation_space = Box(0.0, 100.0, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, rewards, truncates=False):
        self.rewards, self.truncates = rewards, truncates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        last = self.t == len(self.rewards)
        seen = np.array([self.t], np.float32)
        return seen, self.rewards[self.t - 1], last and not self.truncates, last and self.truncates, {}


ONE, OTHER = [3.0, 0.0, 0.0, 0.5], [0.5, -4.0]


def vector(mode, radius=1.0, **options):
    made = SyncVectorEnv([lambda: Script(ONE), lambda: Script(OTHER, truncates=True)], autoreset_mode=mode)
    return VectorClipRewardWithCarry(made, radius, **options)


@pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version")  # it says so of every wrapper
@pytest.mark.parametrize("observe", [False, True])
def test_it_passes_gymnasiums_checker(observe):
    env = ClipRewardWithCarry(gymnasium.make("MountainCar-v0"), 0.5, discount=0.99, observe=observe)
    check_env(env, skip_render_check=True)
    again = gymnasium.make(env.spec)
    assert isinstance(again, ClipRewardWithCarry), "made again from its description"
    assert (again.rewards.radius, again.observe) == (0.5, observe)


@pytest.mark.parametrize("truncates", [False, True])
def test_terminated_and_truncated_episodes_pay_the_rest(truncates):
    env = ClipRewardWithCarry(Script(ONE, truncates), 1.0)
    for _ in range(2):
        assert env.reset(seed=0)[1]["reward_carry"] == 0
        seen = [env.step(0) for _ in ONE]
        assert [step[1] for step in seen] == [1.0, 1.0, 1.0, 0.5]
        assert [step[4]["reward_carry"] for step in seen] == [2.0, 1.0, 0.0, 0.0]
        assert all(type(step[1]) is float for step in seen)


def test_a_flush_may_exceed_the_radius():
    env = ClipRewardWithCarry(Script(OTHER), 1.0)
    env.reset()
    assert [env.step(0)[1] for _ in OTHER] == [0.5, -4.0]


def test_the_learner_may_see_the_carry():
    env = ClipRewardWithCarry(Script([5.0, 0.0, 0.0]), 2.0, observe=True)
    assert env.reset()[0].tolist() == [0.0, 0.0]
    observation = env.step(0)[0]
    assert observation.tolist() == [1.0, 1.5]
    assert observation in env.observation_space
    assert observation.dtype == np.float32


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_episodes_that_reset_by_themselves_keep_their_returns(mode):
    envs = vector(mode)
    envs.reset(seed=0)
    sums, totals = np.zeros(2), [[], []]
    for _ in range(20):
        _, rewards, terminated, truncated, infos = envs.step(np.zeros(2, int))
        sums += rewards
        for i in np.flatnonzero(terminated | truncated):
            totals[i].append(sums[i])
            assert infos["reward_carry"][i] == 0, "nothing is owed across episodes"
            sums[i] = 0
    assert len(totals[0]) == (5 if mode is AutoresetMode.SAME_STEP else 4)
    assert set(totals[0]) == {sum(ONE)}
    assert set(totals[1]) == {sum(OTHER)}


def test_the_step_that_resets_pays_nothing_in_the_next_step_convention():
    envs = vector(AutoresetMode.NEXT_STEP)
    envs.reset(seed=0)
    rewards = np.array([envs.step(np.zeros(2, int))[1] for _ in range(5)])
    assert rewards[:, 0].tolist() == [1.0, 1.0, 1.0, 0.5, 0.0]
    assert rewards[:, 1].tolist() == [0.5, -4.0, 0.0, 0.5, -4.0]


def test_resets_by_hand_begin_only_the_chosen_episodes():
    envs = vector(AutoresetMode.DISABLED)
    envs.reset(seed=0)
    for _ in range(2):
        _, _, terminated, truncated, infos = envs.step(np.zeros(2, int))
    assert infos["reward_carry"].tolist() == [1.0, 0.0]
    _, infos = envs.reset(options={"reset_mask": terminated | truncated})
    assert infos["reward_carry"].tolist() == [1.0, 0.0], "the unfinished one is still owed"
    assert envs.step(np.zeros(2, int))[1].tolist() == [1.0, 0.5]


def test_infos_are_as_other_wrappers_expect_them():
    envs = DictInfoToList(vector(AutoresetMode.SAME_STEP))
    envs.reset(seed=0)
    infos = envs.step(np.zeros(2, int))[4]
    assert [info["reward_carry"] for info in infos] == [2.0, 0.0]


def test_a_wrapper_loaded_in_mid_episode_goes_on():
    env = ClipRewardWithCarry(Script(ONE), 1.0)
    env.reset(seed=0)
    env.step(0)
    inner, state = copy.deepcopy(env.env), env.state_dict()
    other = ClipRewardWithCarry(inner, 1.0)  # around an episode that has begun
    other.load_state_dict(state)
    assert [other.step(0)[1] for _ in range(3)] == [env.step(0)[1] for _ in range(3)] == [1.0, 1.0, 0.5]


def test_a_wrapper_put_around_an_episode_that_has_begun_keeps_the_rest_of_its_return():
    inner = Script([9.0, 3.0, 0.0, 0.0])
    inner.reset()
    inner.step(0)
    env = ClipRewardWithCarry(inner, 1.0)
    assert [env.step(0)[1] for _ in range(3)] == [1.0, 1.0, 1.0]


def test_a_reset_after_loading_begins_an_episode_that_owes_nothing():
    env = ClipRewardWithCarry(Script(ONE), 1.0)
    env.reset()
    env.step(0)
    other = ClipRewardWithCarry(Script(ONE), 1.0)
    other.load_state_dict(env.state_dict())
    assert other.reset()[1]["reward_carry"] == 0
    assert other.rewards.dropped[0] == 2.0, "and what was lost is counted"


def test_vector_states_are_saved_and_those_of_other_sizes_refused():
    envs, others = vector(AutoresetMode.SAME_STEP), vector(AutoresetMode.SAME_STEP)
    for each in (envs, others):
        each.reset(seed=0)
    envs.step(np.zeros(2, int))
    others.load_state_dict(envs.state_dict())
    assert others.rewards.carry.tolist() == [2.0, 0.0]
    with pytest.raises(ValueError, match="is for 2 trajectories, this one has 1"):
        ClipRewardWithCarry(Script(ONE), 1.0).load_state_dict(envs.state_dict())


def test_a_reward_that_is_nan_names_its_environment():
    envs = VectorClipRewardWithCarry(SyncVectorEnv([lambda: Script(ONE), lambda: Script([math.nan, 0.0])]), 1.0)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="the reward of environment 1 is nan"):
        envs.step(np.zeros(2, int))
    assert not envs.rewards.carry.any()


def test_the_wrong_kind_of_environment_is_refused():
    with pytest.raises(TypeError, match="needs a vector environment, got Script"):
        VectorClipRewardWithCarry(Script(ONE), 1.0)
    with pytest.raises(TypeError, match="needs one-dimensional float observations"):
        ClipRewardWithCarry(gymnasium.make("FrozenLake-v1"), observe=True)


def test_without_gymnasium_the_error_says_what_to_install():
    code = "import sys; sys.modules['gymnasium'] = None; import carryclip.integrations.gymnasium"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install gymnasium" in done.stderr
    code = "import sys; import carryclip.rewards; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(loaded) & {"gymnasium", "torch", "jax"}, "the carry itself needs NumPy alone"
