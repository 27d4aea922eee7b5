"""The policy-gradient agent: its arithmetic against sums in numpy, its passes, and that every loss learns."""

import logging

import numpy as np
import pytest
import torch

from tests.agents.in_process import evaluate, learn_through_a_queue
from tests.agents.unrolled import VECTOR, random_batch
from tests.harness import CHAOS
from tests.rl import oracles
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.formats import faster_dtype, has_bfloat16_units
from troupe.common.agents.impala import ImpalaConfig
from troupe.common.agents.learners.learning_rate import LearningRate
from troupe.common.agents.policy_gradient import PolicyGradientConfig
from troupe.common.agents.pqn import PqnConfig
from troupe.common.config import load_config
from troupe.common.errors import CheckpointError
from troupe.common.runtime.checkpoint import open_checkpoint, save_checkpoint

SMALL = {"mlp_units": (8,), "hidden_units": 8, "unroll_steps": 5}
ONE_STEP = {"epochs": 1, "minibatch_steps": 0, "max_grad_norm": 0.0}


def agent_of(seed=0, **fields):
    return make_agent(PolicyGradientConfig(**SMALL | fields), VECTOR, seed=seed)


def updated(agent, batch, **arguments):
    return agent.update(Batch(batch, np.ones(len(batch["action"]), np.float32), **arguments)).metrics


def measured_kl(agent, kl):
    """A loss that moves nothing, and a divergence as if it had moved the policy."""
    return 0.0 * agent.net.head.policy.bias.sum(), {"moved_kl": torch.tensor(kl)}


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


class ByHand:
    """What one batch holds and what the network says of it, in float64."""

    def __init__(self, agent, batch, gamma=0.9):
        unrolls = agent.stored.read(batch)
        with torch.no_grad():
            logits, values, _ = agent.net(
                unrolls.obs, unrolls.last_action, unrolls.last_reward, unrolls.ended != 0, unrolls.memory
            )
        self.logits, values = logits.double().numpy()[:-1], values.double().numpy()
        action, self.reward, ended = (batch[name].T[1:] for name in ("action", "reward", "ended"))
        self.action = action[..., None].astype(int)
        self.mu = batch["behaviour"].transpose(1, 0, 2).astype(float)
        self.log_pi, self.log_mu = self.taken(self.logits), self.taken(self.mu)
        self.values = values[:-1]
        self.sequence = {
            "rewards": self.reward.astype(float), "values": self.values, "discounts": gamma * (ended != 1),
            "next_values": np.where(ended == 2, batch["final_value"].T, values[1:]),
            "continues": (ended == 0).astype(float),
        }  # fmt: skip

    def taken(self, logits):
        return np.take_along_axis(log_softmax(logits), self.action, -1)[..., 0]

    def divergence(self, one, other):
        one, other = log_softmax(one), log_softmax(other)
        return (np.exp(one) * (one - other)).sum(-1).mean()


@pytest.mark.parametrize("memory", [0, 4])
@pytest.mark.parametrize("estimator", ["gae", "vtrace", "n_step"])
def test_ppo_by_hand(estimator, memory):
    agent = agent_of(
        **ONE_STEP, lstm_units=memory, gamma=0.9, lambda_=0.8, advantages=estimator, n_steps=2, rho_bar=0.9,
        c_bar=1.2, clip_epsilon=0.1, baseline_cost=0.7, entropy_cost=0.03, kl_pi_mu_cost=0.2,
        kl_mu_pi_cost=0.3, kl_reference_cost=0.4, advantage_offset=0.1,
    )  # fmt: skip
    batch = random_batch(np.random.default_rng(0), agent, 6)
    by = ByHand(agent, batch)
    log_ratio = by.log_pi - by.log_mu
    if estimator == "gae":
        advantages = oracles.lambda_return(by.sequence, 0.8) - by.values
        targets = advantages + by.values
    elif estimator == "n_step":
        targets = oracles.n_step(by.sequence, 2)
        advantages = targets - by.values
    else:
        targets, weighted = oracles.vtrace(by.sequence, log_ratio, 0.9, 1.2, None, 0.8)
        advantages = weighted / np.exp(log_ratio)
    advantages = (advantages - advantages.mean()) / advantages.std() + 0.1
    ratio = np.exp(log_ratio)
    gradient = -np.minimum(ratio * advantages, ratio.clip(0.9, 1.1) * advantages)
    p = log_softmax(by.logits)
    want = (
        gradient.mean()
        + 0.7 * (0.5 * (targets - by.values) ** 2).mean()
        + 0.03 * (np.exp(p) * p).sum(-1).mean()
        + 0.2 * by.divergence(by.logits, by.mu)
        + 0.3 * by.divergence(by.mu, by.logits)
        + 0.4 * by.divergence(np.zeros_like(by.logits), by.logits)
    )
    got = updated(agent, batch)
    assert got["learner/loss"] == pytest.approx(want, rel=1e-4)
    assert got["learner/clipped"] == pytest.approx((abs(ratio - 1) > 0.1).mean())


@pytest.mark.parametrize(
    ("loss", "rho_bar"),
    [("vtrace", None), *((loss, 0.8) for loss in ("vpg", "vtrace", "awr", "cloning", "positive_cloning"))],
)
def test_losses_that_weigh_the_log_likelihood(loss, rho_bar):
    agent = agent_of(
        **ONE_STEP, gamma=0.9, policy_loss=loss, rho_bar=rho_bar, awr_temperature=0.5, awr_max_weight=3.0,
        normalize_advantages=False,
    )  # fmt: skip
    batch = random_batch(np.random.default_rng(0), agent, 6)
    by = ByHand(agent, batch)
    advantages = oracles.lambda_return(by.sequence, 0.95) - by.values
    weights = {
        "vpg": advantages,
        "vtrace": np.minimum(np.exp(by.log_pi - by.log_mu), rho_bar or np.inf) * advantages,
        "awr": np.minimum(np.exp(advantages / 0.5), 3.0),
        "cloning": np.ones_like(advantages),
        "positive_cloning": advantages > 0,
    }[loss]
    assert updated(agent, batch)["learner/policy_loss"] == pytest.approx(
        (-by.log_pi * weights).mean(), rel=1e-4
    )


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_normalised_returns_are_the_unit_of_baseline_and_advantages(scale):
    agent = agent_of(
        **ONE_STEP, gamma=0.9, lambda_=0.8, normalize_returns=True, normalize_advantages=False,
        policy_loss="vpg", see_last_step=False,
    )  # fmt: skip
    first, second = (random_batch(np.random.default_rng(seed), agent, 6) for seed in (0, 1))
    for batch in first, second:
        batch["reward"] = scale * (20 * batch["reward"] + 50)
        batch["final_value"] *= scale
    by = ByHand(agent, first)
    # What the network says before it has seen returns has no unit: they are of rewards alone.
    nothing = np.where(first["ended"].T[1:] == 2, first["final_value"].T, 0.0)
    by.sequence |= {"values": np.zeros_like(by.values), "next_values": nothing}
    targets = oracles.lambda_return(by.sequence, 0.8)
    got = updated(agent, first)
    want = 0.5 * (((targets - targets.mean()) / targets.std() - by.values) ** 2).mean()
    assert got["learner/baseline_loss"] == pytest.approx(want, rel=1e-3)
    want = (-by.log_pi * targets / targets.std()).mean()
    assert got["learner/policy_loss"] == pytest.approx(want, rel=1e-3)
    mean, variance = (agent.params()[f"returns.{name}"][0] for name in ("mean", "variance"))
    np.testing.assert_allclose((mean, variance), (targets.mean(), targets.var()), rtol=1e-4)
    # From now on values have the unit of returns, and keep what they say while the statistics move.
    by = ByHand(agent, second)
    said = ByHand(agent, second).values * np.sqrt(variance) + mean
    following = np.concatenate([said[1:], by.sequence["next_values"][-1:] * np.sqrt(variance) + mean])
    following = np.where(second["ended"].T[1:] == 2, second["final_value"].T, following)
    by.sequence |= {"values": said, "next_values": following}
    targets = oracles.lambda_return(by.sequence, 0.8)
    got = updated(agent, second)
    deviation = np.sqrt(agent.params()["returns.variance"][0])
    want = 0.5 * (((targets - said) / deviation) ** 2).mean()
    assert got["learner/baseline_loss"] == pytest.approx(want, rel=1e-3)
    want = (-by.log_pi * (targets - said) / deviation).mean()
    assert got["learner/policy_loss"] == pytest.approx(want, rel=1e-3)


def test_a_target_network_is_what_the_ratio_is_clipped_round():
    """IMPACT: min(mu/target, bar) pi/mu, with V-trace for the target's policy."""
    agent = agent_of(
        **ONE_STEP, gamma=0.9, advantages="vtrace", lambda_=1.0, target_period_updates=2,
        target_ratio_bar=1.5,
        learning_rate=0.05, normalize_advantages=False,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    first, second = random_batch(rng, agent, 6), random_batch(rng, agent, 6)
    target = ByHand(agent, second)
    updated(agent, first)
    by = ByHand(agent, second)
    assert abs(by.logits - target.logits).max() > 0.01
    by.sequence["values"] = by.values
    _, weighted = oracles.vtrace(by.sequence, target.log_pi - by.log_mu, 1.0, 1.0, None, 1.0)
    advantages = weighted / np.exp(target.log_pi - by.log_mu)
    ratio = np.minimum(np.exp(by.log_mu - target.log_pi), 1.5) * np.exp(by.log_pi - by.log_mu)
    want = -np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).mean()
    assert updated(agent, second)["learner/policy_loss"] == pytest.approx(want, rel=1e-4)
    # Renewed after two updates: from now on both are one policy, with the ratio's weight alone.
    by = ByHand(agent, first)
    _, weighted = oracles.vtrace(by.sequence, by.log_pi - by.log_mu, 1.0, 1.0, None, 1.0)
    advantages = weighted / np.exp(by.log_pi - by.log_mu)
    ratio = np.minimum(np.exp(by.log_mu - by.log_pi), 1.5) * np.exp(by.log_pi - by.log_mu)
    want = -np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).mean()
    assert updated(agent, first)["learner/policy_loss"] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("memory", [0, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_decoupled_clips_the_ratio_around_the_policy_that_began_the_update(memory, recompute):
    """Weighs steps by its ratio to the one that acted, and measures from it how far the policy moves."""
    agent = agent_of(
        gamma=0.9, lambda_=0.8, decoupled=True, learning_rate=0.03, epochs=2, minibatch_steps=0,
        max_grad_norm=0.0, normalize_advantages=False, lstm_units=memory, recompute_advantages=recompute,
    )  # fmt: skip
    batch = random_batch(np.random.default_rng(0), agent, 6)
    updated(agent, batch)
    began, passes = ByHand(agent, batch), []
    own_loss = agent._loss

    def watched(steps):
        passes.append((ByHand(agent, batch), own_loss(steps)[1]))
        return own_loss(steps)

    agent._loss = watched
    updated(agent, batch)
    weight = np.exp(began.log_pi - began.log_mu)
    assert weight.min() < 1.0 < 2.0 < weight.max()
    for by, measured in passes:
        judge = by if recompute else began
        advantages = oracles.lambda_return(judge.sequence, 0.8) - judge.values
        ratio = np.exp(by.log_pi - began.log_pi)
        surrogate = np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages)
        want = -(np.minimum(weight, 2.0) * surrogate).mean()
        assert measured["policy_loss"].item() == pytest.approx(want, rel=1e-3)
        assert measured["moved_kl"].item() == pytest.approx(by.divergence(began.logits, by.logits), abs=1e-6)
    assert passes[0][1]["moved_kl"] == 0.0
    assert passes[1][1]["moved_kl"] > 1e-4


def test_decoupled_alone_names_the_policy_to_clip_around():
    for fields in ({"target_period_updates": 2}, {"policy_loss": "vpg"}):
        with pytest.raises(ValueError, match="decoupled"):
            agent_of(decoupled=True, **fields)


@pytest.mark.parametrize("memory", [0, 4])
@pytest.mark.parametrize("mode", ["shuffle", "split", "repeat"])
def test_each_pass_takes_every_step_once(mode, memory):
    agent = agent_of(epochs=3, minibatch_steps=15, batch_mode=mode, lstm_units=memory)
    batch = random_batch(np.random.default_rng(0), agent, 12)
    batch["behaviour"][...] = np.arange(12 * 5 * 4).reshape(12, 5, 4)  # names each step
    seen = []
    agent._loss = lambda steps: seen.append(steps) or measured_kl(agent, 0.0)
    updated(agent, batch)
    names = [set(steps.behaviour[..., 0].flatten().tolist()) for steps in seen]
    parts = 1 if mode == "repeat" else 4
    assert len(names) == 3 * parts
    everything = set(range(0, 240, 4))
    for first in range(0, len(names), parts):
        whole = names[first : first + parts]
        assert set().union(*whole) == everything
        assert sum(map(len, whole)) == 60
    again = names[:parts] == names[parts : 2 * parts]
    assert again == (mode != "shuffle")
    if memory:
        assert all(steps.behaviour.shape[0] == 5 for steps in seen)


def test_the_learning_rate_follows_the_divergence_of_a_pass(tmp_path):
    agent = agent_of(learning_rate_schedule="kl", kl_target=0.01, learning_rate=1e-3, epochs=1)
    for kl, rate in ((0.03, 1e-3 / 1.5), (0.015, 1e-3 / 1.5), (0.001, 1e-3), (0.5, 1e-3 / 1.5)):
        agent._loss = lambda steps, kl=kl: measured_kl(agent, kl)
        got = updated(agent, random_batch(np.random.default_rng(0), agent, 2))
        assert got["learner/learning_rate"] == pytest.approx(rate)
    arrays, meta = agent.state()
    save_checkpoint(tmp_path, arrays, meta)
    read = open_checkpoint(tmp_path).arrays
    as_a_row = {name: np.atleast_1d(array) for name, array in read.items()}  # in files of earlier versions
    for saved in (arrays, read, as_a_row):
        again = agent_of(seed=1, learning_rate_schedule="kl", kl_target=0.01, learning_rate=1e-3)
        again.load_state(saved, meta)
        assert again.learner.rate.value == pytest.approx(1e-3 / 1.5)


def test_schedules():
    for schedule, rate in (("linear", 0.55), ("polynomial", 0.325), ("constant", 1.0)):
        agent = agent_of(
            learning_rate=1.0, learning_rate_final=0.1, learning_rate_power=2.0,
            learning_rate_schedule=schedule, epochs=1,
        )  # fmt: skip
        batch = random_batch(np.random.default_rng(0), agent, 2)
        assert updated(agent, batch, progress=0.5)["learner/learning_rate"] == pytest.approx(rate)


def test_a_learning_rate_follows_the_policy_only_where_there_is_one():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    for config in (ImpalaConfig(), PqnConfig()):
        rate = LearningRate(config, optimizer)
        rate.follow_kl(torch.tensor(100.0))
        assert not rate.follows_kl
        assert rate.value == 0.5
        assert not any(name.startswith("kl_target") for name in type(config).model_fields)


def test_gamma_may_be_given_per_frame():
    spec = VECTOR.__class__(**{**vars(VECTOR), "frames_per_step": 4})
    config = PolicyGradientConfig(**SMALL, gamma=0.9, gamma_per_frame=True)
    assert make_agent(config, spec, seed=0)._gamma == pytest.approx(0.6561)


def test_multipliers_and_the_target_network_are_part_of_a_checkpoint():
    fields = {"entropy_target": 1.0, "target_period_updates": 3, "policy_loss": "ppo", "lstm_units": 4}
    first, second = agent_of(**fields), agent_of(seed=1, **fields)
    batch = random_batch(np.random.default_rng(0), first, 6)
    for _ in range(2):
        updated(first, batch)
    second.load_state(*first.state())
    for _ in range(3):
        ours = updated(first, batch)
        assert ours == updated(second, batch)
    with pytest.raises(CheckpointError, match="does not fit"):
        agent_of(entropy_target=1.0).load_state(*first.state())


LOSSES = {
    "vpg": {"policy_loss": "vpg", "epochs": 1},
    "vtrace": {"policy_loss": "vtrace", "advantages": "vtrace", "epochs": 2},
    "awr": {"policy_loss": "awr", "awr_temperature": 0.5},
    "vmpo": {
        "policy_loss": "vmpo", "normalize_advantages": False, "kl_mu_pi_cost": 1.0, "kl_mu_pi_target": 0.01,
    },
    "impact": {"advantages": "vtrace", "target_period_updates": 2, "epochs": 4},
}  # fmt: skip


def cartpole(steps, **changes):
    """Mean return over 20 games after so many steps with the preset's values, but for `changes`."""
    config = load_config("cartpole-ppo")
    agent, _ = learn_through_a_queue(
        config.agent.model_copy(update=changes), config.env, slots=config.actor.slots,
        batch=config.replay.batch_size, steps=steps, seed=1,
    )  # fmt: skip
    return evaluate(agent, config.env)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ppo_learns_cartpole():
    assert cartpole(40_000) >= 450


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LOSSES if CHAOS else ["vmpo"])
def test_every_loss_gets_far_better_than_chance(name):
    """Random play brings 22; each of them holds the pole for 475 steps after 100,000."""
    assert cartpole(50_000 if CHAOS else 25_000, **LOSSES[name]) >= 100


OF = {"of": "learning", "what": "a minibatch"}


class Clock:
    """Moves with trial steps only: each takes the next time of its dtype, in the end the last one."""

    def __init__(self, exact, short):
        self.now_s = 0.0
        self._steps_s = {torch.float32: exact, torch.bfloat16: short}

    def __call__(self):
        return self.now_s

    def step(self, dtype):
        steps_s = self._steps_s[dtype]
        self.now_s += steps_s.pop(0) if len(steps_s) > 1 else steps_s[0]


@pytest.mark.parametrize(
    ("exact", "short", "chosen"),
    [
        ([0.020], [0.001], torch.bfloat16),
        ([0.001], [0.020], torch.float32),
        ([0.020], [0.019], torch.float32),  # hardly faster, and less exact
        ([0.020], [9.0, 0.001], torch.bfloat16),  # the first step does not count
        ([0.020], [9.0, 9.0, 0.001, 9.0], torch.bfloat16),  # nor do those that something else held up
        (
            [0.020],
            [9.0, *[0.020] * 9, 0.001],
            torch.bfloat16,
        ),  # of short ones, not even if it is most of them
    ],
)
def test_bfloat16_is_chosen_where_a_trial_is_faster(exact, short, chosen):
    clock = Clock(exact, short)
    found = faster_dtype("auto", torch.device("cpu"), clock.step, **OF, has_units=lambda: True, clock=clock)
    assert found == chosen


def test_a_trial_goes_by_turns_so_that_other_work_disturbs_both():
    tried = []
    faster_dtype("auto", torch.device("cpu"), tried.append, **OF, has_units=lambda: True)
    turns = tried[2:]  # the first of each does not count
    assert turns == [torch.float32, torch.bfloat16] * (len(turns) // 2)
    assert len(turns) >= 4


def test_no_trial_is_made_where_bfloat16_would_be_emulated(caplog):
    caplog.set_level(logging.INFO)
    tried = []
    # Whoever asks for it gets it.
    for wanted, dtype in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        assert faster_dtype(wanted, torch.device("cpu"), tried.append, **OF, has_units=lambda: False) == dtype
    assert not tried
    assert "the processor has no units for bfloat16" in caplog.text


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("model name\t: AMD EPYC bf16\nflags\t\t: fpu avx avx2\n", False),
        ("flags\t\t: avx512f avx512_bf16 avx512_fp16\n", True),
        ("flags\t\t: amx_tile amx_bf16\n", True),
        ("flags\t\t: avx512f avx512_bf16x\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd sve svebf16 i8mm\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("", False),
    ],
)
def test_a_processor_says_whether_it_has_units_for_bfloat16(tmp_path, text, has):
    (tmp_path / "cpuinfo").write_text(text)
    assert has_bfloat16_units(tmp_path / "cpuinfo") == has
    assert not has_bfloat16_units(tmp_path / "none")


def test_bfloat16_changes_little():
    exact, short = (agent_of(**ONE_STEP, compute_dtype=dtype) for dtype in ("float32", "bfloat16"))
    batch = random_batch(np.random.default_rng(0), exact, 6)
    ours, theirs = updated(exact, batch), updated(short, batch)
    assert ours != theirs
    assert ours["learner/loss"] == pytest.approx(theirs["learner/loss"], rel=0.05)
    assert all(array.dtype == np.float32 for array in short.params().values())
