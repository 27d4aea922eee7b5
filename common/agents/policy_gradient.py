"""The configurable policy-gradient agent: several passes over fresh unrolls, with a choice of losses.

One loop serves PPO (Schulman et al. 2017), plain policy gradients, V-trace, advantage-weighted regression
(Peng et al. 2019), V-MPO (Song et al. 2020), cloning, and asynchronous PPO with a target network (IMPACT, Luo
et al. 2020) or a decoupled objective (Hilton et al. 2022): `agent.policy_loss`, `agent.advantages`,
`agent.max_staleness` and `agent.decoupled` choose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from troupe.common.agents.base import Act, Batch, Inputs
from troupe.common.agents.learners.learning_rate import AdaptiveRateConfig
from troupe.common.agents.learners.optimizers import Adam
from troupe.common.agents.learners.passes import (
    PassesConfig,
    PassesLearner,
    Steps,
    inputs_of,
    means,
    styled_body,
)
from troupe.common.agents.network import NetworkAgent, Step, suited
from troupe.common.agents.policies import drawn, policy_distribution, policy_options
from troupe.common.agents.stored.unrolls import StoredUnrolls, Unrolls
from troupe.common.agents.tensors import frozen_copy
from troupe.common.config.fields import PolicyConfig, StepCount, TableNeeds, structural, tunable
from troupe.common.nets.actor_critic import ActorCritic
from troupe.common.rl import policy, policy_losses
from troupe.common.rl.normalizers import normalized_advantages
from troupe.common.rl.policy_losses import Multiplier
from troupe.common.rl.sequences import generalized_advantages, n_step_returns
from troupe.common.rl.vtrace import clipped, vtrace

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec

PolicyLoss = Literal["ppo", "vpg", "vtrace", "awr", "vmpo", "cloning", "positive_cloning"]


class PolicyGradientConfig(AdaptiveRateConfig, PassesConfig, PolicyConfig):
    """Fields of `[agent]` for `algorithm = "policy_gradient"`; defaults are PPO's."""

    table = TableNeeds("queue", replays=True)
    several_learners = True

    pixel_torso: ClassVar[str] = "shallow"

    algorithm: Literal["policy_gradient"] = structural(
        "policy_gradient", "PPO and its relatives: several passes over fresh unrolls."
    )
    shared_torso: bool = structural(True, "One torso for policy and baseline; false: one each.")
    unroll_steps: StepCount = structural(
        128, "Steps of an unroll. They are sent together; actor.chunk_steps has no effect."
    )
    policy_loss: PolicyLoss = tunable(
        "ppo",
        "ppo: clipped ratio; vpg: plain gradient; vtrace: gradient with clipped importance weights; awr: "
        "exponential weights; vmpo: better half, softmax weights; cloning: all steps; positive_cloning: "
        "only steps with a positive advantage.",
    )
    advantages: Literal["gae", "vtrace", "n_step"] = tunable(
        "gae", "Estimator of advantages and value targets."
    )
    gamma_per_frame: bool = tunable(
        False, "gamma is per emulator frame: a step of k frames discounts by gamma^k."
    )
    lambda_: float = tunable(0.95, "Lambda of GAE, or of V-trace's traces.", ge=0, le=1)
    n_steps: int = tunable(5, "Steps of reward, with advantages = n_step.", ge=1)
    rho_bar: float | None = tunable(1.0, "Maximum importance weight of V-trace; none = no clipping.", gt=0)
    c_bar: float | None = tunable(1.0, "Maximum trace weight of V-trace; none = no clipping.", gt=0)
    normalize_advantages: bool = tunable(
        True, "Normalise the advantages of a batch to mean 0 and standard deviation 1."
    )
    advantage_offset: float = tunable(0.0, "Added to advantages after normalisation.")
    clip_epsilon: float = tunable(0.2, "ppo: maximum distance of the probability ratio from 1.", gt=0)
    clip_lower: policy_losses.LowerBound = tunable(
        "symmetric", "ppo: lower bound of the ratio, 1 - epsilon or 1 / (1 + epsilon)."
    )
    dual_clip: float | None = tunable(
        None, "ppo: a bad step's loss is at most this times its advantage; none = no limit.", gt=1
    )
    awr_temperature: float = tunable(1.0, "awr: advantages are divided by this before exp.", gt=0)
    awr_max_weight: float = tunable(20.0, "awr: maximum weight of a step.", gt=0)
    vmpo_epsilon: float = tunable(
        0.1, "vmpo: maximum divergence of its weights from uniform weights, in nats.", gt=0
    )
    vmpo_temperature: float = tunable(1.0, "vmpo: initial temperature.", gt=0)
    value_loss: Literal["mse", "huber"] = tunable("mse", "Loss of the baseline.")
    huber_delta: float = tunable(1.0, "huber: error at which the loss becomes linear.", gt=0)
    value_clip: float | None = tunable(
        None, "Maximum change of a value within one batch; none = no clipping.", gt=0
    )
    baseline_cost: float = tunable(0.5, "Weight of the baseline's loss.", ge=0)
    entropy_cost: float = tunable(0.01, "Weight of the entropy bonus.", ge=0)
    entropy_target: float | None = tunable(
        None, "Target for the entropy, in nats, held by adjusting the weight; none = fixed weight.", ge=0
    )
    kl_pi_mu_cost: float = tunable(0.0, "Weight of KL(pi || mu), from the policy that acted.", ge=0)
    kl_pi_mu_target: float | None = tunable(
        None, "Upper limit, held by adjusting the weight; none = fixed weight.", gt=0
    )
    kl_mu_pi_cost: float = tunable(0.0, "Weight of KL(mu || pi).", ge=0)
    kl_mu_pi_target: float | None = tunable(
        None, "Upper limit, held by adjusting the weight; none = fixed weight.", gt=0
    )
    kl_reference_cost: float = tunable(
        0.0,
        "Weight of KL(uniform || pi); for continuous actions, from the policy with all parameters 0.",
        ge=0,
    )
    kl_reference_target: float | None = tunable(
        None, "Upper limit, held by adjusting the weight; none = fixed weight.", gt=0
    )
    adjustment_speed: float = tunable(10.0, "Speed with which weights are adjusted to their targets.", gt=0)
    target_period_updates: int = tunable(
        0,
        "ppo: updates between copies of the policy around which the ratio is clipped and the KL of the "
        "schedule kl is measured, as in IMPACT; 0 = around the policy that acted.",
        ge=0,
    )
    target_ratio_bar: float = tunable(2.0, "Maximum weight of the acting policy relative to that copy.", gt=0)
    decoupled: bool = tunable(
        False,
        "ppo: clip the ratio, and measure the KL of the schedule kl, around the policy at the beginning "
        "of an update, and weight each step by the ratio of that policy to the one that acted. For "
        "max_staleness above 0.",
    )
    recompute_advantages: bool = tunable(False, "Recompute advantages before each pass, instead of once.")

    @model_validator(mode="after")
    def _one_policy_is_clipped_around(self) -> PolicyGradientConfig:
        # Refused because they are silent: somebody who sets one of them would believe that it does something.
        if self.decoupled and self.policy_loss != "ppo":
            raise ValueError(
                f"decoupled has no effect with policy_loss {self.policy_loss}: it clips no ratio"
            )
        if self.decoupled and self.target_period_updates:
            raise ValueError("decoupled and target_period_updates each name a policy to clip around: set one")
        return self

    @property
    def clips_around_the_actor(self) -> bool:
        """Whether the policy that acted is the one around which the ratio is clipped."""
        return not (self.decoupled or self.target_period_updates)

    @property
    def one_learner_because(self) -> str:
        """See the base class."""
        if self.policy_loss == "vmpo":
            return "agent.policy_loss vmpo weighs each step against all others of its minibatch"
        return super().one_learner_because


MAX_LOG_RATIO = 20.0
"""Log-ratios of the learning policy to the one that acted are clipped, so that malformed behaviour parameters
cannot overflow exp."""

MAX_DECOUPLED_WEIGHT = 2.0
"""Largest weight of a step with `agent.decoupled`. The paper has no limit; without one, a step that the
acting policy hardly ever makes could be most of a gradient."""


@dataclass(frozen=True, slots=True)
class JudgedSteps(Steps):
    """Steps, and how well they went."""

    behaviour: Tensor
    """Parameters of the policy that acted."""
    advantage: Tensor
    proximal: Tensor
    """Parameters of the policy around which the ratio is clipped: `behaviour`, or another one's."""
    anchor: Tensor
    """`log(mu / pi_proximal)`, clipped from above."""


class _Adjusted(nn.Module):
    """What learning holds apart from the network: multipliers, a temperature and the target."""

    def __init__(self, config: PolicyGradientConfig, net: nn.Module) -> None:
        super().__init__()
        self._speed = config.adjustment_speed
        costs = {
            "entropy": (config.entropy_cost, config.entropy_target),
            "kl_pi_mu": (config.kl_pi_mu_cost, config.kl_pi_mu_target),
            "behaviour_kl": (config.kl_mu_pi_cost, config.kl_mu_pi_target),
            "kl_reference": (config.kl_reference_cost, config.kl_reference_target),
        }
        self.multipliers: dict[str, Multiplier] = nn.ModuleDict(  # type: ignore[assignment]
            {
                name: Multiplier(*cost_and_target, at_most=name != "entropy", speed=self._speed)
                for name, cost_and_target in costs.items()
            }
        )
        # As `Multiplier`: on a logarithmic scale, with a speed of its own beside the network's learning rate.
        self.log_temperature = nn.Parameter(torch.tensor(config.vmpo_temperature).log() / self._speed)
        self.target = frozen_copy(net) if config.target_period_updates else None

    @property
    def temperature(self) -> Tensor:
        """Of V-MPO, a positive scalar."""
        # exp(14) is about a million: beyond it, or below its inverse, V-MPO's weights are uniform or a single
        # one anyway.
        return policy_losses.clamped(self._speed * self.log_temperature, 14.0).exp()


class PolicyGradientAgent(NetworkAgent):
    """Acts, stores and learns. See `troupe.common.agents.base.Agent` for the methods' contracts."""

    config: PolicyGradientConfig
    net: ActorCritic

    def __init__(
        self, config: PolicyGradientConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu"
    ) -> None:
        self.policy = policy_distribution(config, spec)
        super().__init__(config, spec, seed=seed, device=device)
        self._huber_delta = config.huber_delta if config.value_loss == "huber" else None
        self._gamma = config.gamma ** (spec.frames_per_step if config.gamma_per_frame else 1)

    # ---------------------------------------------------------------- acting

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Actions drawn from the policy with chance `epsilon`, else its most likely ones."""
        params, _, memory = self.net(*self.step_of(inputs).sequence())
        behaviour = params[0].cpu().numpy()
        action = drawn(self.policy, behaviour, epsilon, rng)
        return self._acted(action, {"behaviour": behaviour}, inputs, memory)

    def decide(self, step: Step) -> dict[str, Tensor]:
        """See the base class."""
        params, _, memory = self.net(*step.sequence())
        return {"action": self.policy.best(params[0]), "policy": params[0], "next_memory": memory}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """The baseline `[S]` float32, in the unit of returns."""
        return self.net.in_returns(self.net(*self.step_of(inputs).sequence())[1][0]).cpu().numpy()

    # -------------------------------------------------------------- learning

    def told(self, batch: Batch) -> dict[str, Tensor | np.ndarray]:
        """See the base class. Unrolls may be fresh or `replayed`; `weights` are not looked at."""
        self.learner.rate.follow_progress(batch.progress)
        columns = self.learner.drawn(self.config.unroll_steps, len(batch.weights))
        told: dict[str, Tensor | np.ndarray] = {**batch.fields, **columns}
        if batch.replayed is not None:
            told["replayed"] = batch.replayed
        return told

    def learn(self, told: dict[str, Tensor], *, measure: bool) -> dict[str, Tensor]:
        """`agent.epochs` passes over `[B]` unrolls."""
        learner, moves = self.learner, self.learner.branch
        unrolls = learner.prepared(self.stored.read(told))
        measured = learner.learn(told, lambda previous: self._estimated(unrolls, previous), self._loss)
        if self.adjusted.target is not None and moves:
            self.adjusted.target.load_state_dict(self.net.state_dict())
        return means(measured) if measure else {}

    @property
    def no_graph_because(self) -> str:
        """See the base class."""
        return "V-MPO picks the better half of the steps" if self.config.policy_loss == "vmpo" else ""

    def _loss(self, steps: JudgedSteps) -> tuple[Tensor, dict[str, Tensor]]:
        params, values = self.learner.forward(*steps.inputs)
        log_probs = self.policy.log_prob(params, steps.action)
        log_ratio = log_probs - self.policy.log_prob(steps.behaviour, steps.action)
        # From above only: a ratio near 0 is harmless, and its gradient is wanted.
        log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
        # log(pi / mu) + log(mu / pi_target) = log(pi / pi_target): IMPACT's ratio, with the weight of mu
        # against the target clipped beforehand (Luo et al. 2020).
        log_ratio = log_ratio + steps.anchor
        gradient = self._policy_loss(log_probs, log_ratio, steps.advantage)
        baseline = policy_losses.value_errors(
            values, steps.value, steps.target, self.config.value_clip, self._huber_delta
        ).mean()
        # Parameters of zeros are uniform logits, or the first policy of real numbers, as `Reals` makes them.
        reference = torch.zeros_like(params)
        measured = {
            "entropy": self.policy.entropy(params).mean(),
            "kl_pi_mu": self.policy.kl(params, steps.behaviour).mean(),
            "behaviour_kl": self.policy.kl(steps.behaviour, params).mean(),
            "kl_reference": self.policy.kl(reference, params).mean(),
        }
        measured["moved_kl"] = (
            measured["behaviour_kl"]
            if self.config.clips_around_the_actor
            else self.policy.kl(steps.proximal, params).mean()
        )
        loss = gradient + self.config.baseline_cost * baseline
        for name, multiplier in self.adjusted.multipliers.items():
            if multiplier.used:
                loss = loss + multiplier.loss(measured[name])
                measured[f"{name}_cost"] = multiplier.value()
        # Measured for every loss, also where nothing is clipped: it tells how far a batch has moved the
        # policy.
        clipped = ((log_ratio.exp() - 1.0).abs() > self.config.clip_epsilon).float().mean()
        measured |= {"policy_loss": gradient, "baseline_loss": baseline, "clipped": clipped}
        measured["value_mean"] = values.mean()
        return loss, measured

    def _policy_loss(self, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """The scalar that `agent.policy_loss` names, and V-MPO's temperature loss with it."""
        config = self.config
        match config.policy_loss:
            case "ppo":
                return policy_losses.clipped_surrogate(
                    log_ratio, advantages, config.clip_epsilon, config.clip_lower, config.dual_clip
                ).mean()
            case "vmpo":
                best, temperature = policy_losses.vmpo_loss(
                    log_probs, advantages, self.adjusted.temperature, config.vmpo_epsilon
                )
                return best + temperature
            case "vpg":
                weights = advantages
            case "vtrace":
                weights = clipped(log_ratio.exp(), config.rho_bar) * advantages
            case "awr":
                weights = policy_losses.exponential_weights(
                    advantages, config.awr_temperature, config.awr_max_weight
                )
            case "cloning":
                weights = torch.ones_like(advantages)
            case "positive_cloning":
                weights = (advantages > 0).to(advantages.dtype)
        return policy_losses.weighted_log_likelihood(log_probs, weights).mean()

    # ------------------------------------------------------------- estimates

    @torch.no_grad()
    def _estimated(self, unrolls: Unrolls, previous: JudgedSteps | None) -> JudgedSteps:
        """The batch with values, advantages and value targets of the present weights."""
        config, learner = self.config, self.learner
        if previous is not None and not config.recompute_advantages:
            return previous
        params, values = learner.evaluated(unrolls)
        actions = unrolls.last_action[1:]
        log_mu = self.policy.log_prob(unrolls.behaviour, actions)
        log_pi = self.policy.log_prob(params[:-1], actions)
        proximal = self._proximal(unrolls, params[:-1], previous)
        is_actors = config.clips_around_the_actor
        log_proximal = log_mu if is_actors else self.policy.log_prob(proximal, actions)
        limit = MAX_LOG_RATIO
        if self.adjusted.target is not None:
            log_pi = log_proximal  # V-trace then values the target's policy, towards which learning is held
            limit = math.log(config.target_ratio_bar)
        anchor = (log_mu - log_proximal).clamp(max=limit)
        said, values = values, self.net.in_returns(values)
        advantages, targets = self._advantages(unrolls, log_pi - log_mu, values)
        if (returns := self.net.returns) is not None:
            first = returns.count == 0
            # Statistics move once per batch: moved in each pass, targets would change their scale between
            # passes.
            if previous is None:
                self.net.observe_returns(targets)
            values, targets = torch.where(first, said, returns(values)), returns(targets)
        if config.normalize_advantages:
            # Over the whole batch, not each minibatch as the reference does: a minibatch of few steps has a
            # noisy deviation.
            reduction = learner.reduction
            together = None if reduction.alone else reduction.moments
            advantages = normalized_advantages(advantages, together=together)
        elif returns is not None:
            # Policy and baseline learn on the same scale, whatever that of rewards (Hessel et al. 2019,
            # equation 8).
            advantages = advantages / returns.deviation.float()
        advantages = advantages + config.advantage_offset
        if config.decoupled:
            # Steps of mu stand for those of the policy that begins the update (Hilton et al. 2022).
            advantages = advantages * clipped((log_proximal - log_mu).exp(), MAX_DECOUPLED_WEIGHT)
        steps = JudgedSteps(
            **inputs_of(unrolls),
            behaviour=unrolls.behaviour,
            value=values[:-1],
            advantage=advantages,
            target=targets,
            proximal=proximal,
            anchor=anchor,
        )
        # Without memory single steps are shuffled; with it whole unrolls have to stay together.
        return steps if self.memory_size else steps.flattened()

    def _proximal(self, unrolls: Unrolls, now: Tensor, previous: JudgedSteps | None) -> Tensor:
        """Parameters `[T, B, P]` of the policy to clip around, where the network's are `now`."""
        if self.config.clips_around_the_actor:
            return unrolls.behaviour
        if self.adjusted.target is not None:
            return self.learner.evaluated(unrolls, self.adjusted.target)[0][:-1]
        return now if previous is None else previous.proximal.reshape(now.shape)

    def _advantages(self, unrolls: Unrolls, log_rhos: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and value targets `[T, B]` for values `[T + 1, B]`."""
        config = self.config
        rewards = config.reward_scale * policy.clip_reward(unrolls.last_reward[1:], config.reward_clip)
        rewards, discounts, following, continues = unrolls.outcomes_with(rewards, values, self._gamma)
        if config.advantages == "vtrace":
            corrected = vtrace(
                log_rhos,
                rewards,
                discounts,
                values[:-1],
                following,
                continues,
                rho_bar=config.rho_bar,
                c_bar=config.c_bar,
                lambda_=config.lambda_,
            )
            return corrected.errors, corrected.targets  # the policy's loss weighs steps itself
        if config.advantages == "n_step":
            targets = n_step_returns(rewards, discounts, following, continues, config.n_steps)
            return targets - values[:-1], targets
        advantages = generalized_advantages(
            rewards, discounts, values[:-1], following, continues, config.lambda_
        )
        return advantages, advantages + values[:-1]

    # ----------------------------------------------------------------- parts

    def _network(self) -> ActorCritic:
        config, spec = self.config, self.spec

        def make(torso: str) -> ActorCritic:
            options = styled_body(config, spec) | policy_options(config, self.policy, spec)
            return ActorCritic(spec.seen_shape, spec.actions, torso, shared=config.shared_torso, **options)

        return suited(config, spec, make)

    @cached_property
    def stored(self) -> StoredUnrolls:
        """See the base class."""
        return StoredUnrolls(
            self.spec,
            self.config.unroll_steps,
            self.net.state_size,
            staggered=self.config.allowed_staleness is None,
            behaviour_size=self.policy.size,
            device=self.device,
        )

    @cached_property
    def adjusted(self) -> _Adjusted:
        """See there; only a learner makes it."""
        return _Adjusted(self.config, self.net).to(self.device)

    @cached_property
    def learner(self) -> PassesLearner:
        """See the base class."""
        config = self.config
        parameters = [each for each in self.adjusted.parameters() if each.requires_grad]
        optimizer = Adam(
            [*self.net.parameters(), *parameters],
            lr=config.learning_rate,
            eps=config.optimizer_epsilon,
            fused=True,
        )
        return PassesLearner(
            config,
            self.net,
            optimizer,
            self.adjusted,
            seed=self.seed,
            pixels=self.spec.pixels,
            period_updates=config.target_period_updates,
        )


make = PolicyGradientAgent
"""What the registry calls."""
