"""IMPALA: actor-critic on unrolls of slightly old policies, corrected by V-trace (Espeholt et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from troupe.common.agents.base import Act, Batch, Inputs, Update
from troupe.common.agents.learners.learning_rate import LearningRate, LearningRateConfig
from troupe.common.agents.learners.optimizers import Adam
from troupe.common.agents.learners.rmsprop import RMSProp
from troupe.common.agents.network import Learner, NetworkAgent, Step, body_options, suited
from troupe.common.agents.policies import drawn, policy_distribution, policy_options
from troupe.common.agents.stored.unrolls import StoredUnrolls, Unrolls
from troupe.common.agents.tensors import module_arrays, tensors
from troupe.common.config.fields import PolicyConfig, StepCount, TableNeeds, Units, structural, tunable
from troupe.common.data.distances import Distance, distances, nearness
from troupe.common.errors import ConfigError
from troupe.common.nets.actor_critic import ActorCritic
from troupe.common.rl import policy
from troupe.common.rl.policy_losses import Multiplier
from troupe.common.rl.replayed import cloning, implied_kl, trusted_steps
from troupe.common.rl.returns import explained_variance
from troupe.common.rl.vtrace import VTrace, vtrace

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec

LARGEST_FEATURE = float(np.finfo(np.float16).max)
"""What is stored of features is float16: larger ones would be infinite, and their unroll left out."""


class ImpalaConfig(LearningRateConfig, PolicyConfig):
    """Fields of `[agent]` for `algorithm = "impala"`; defaults are those of the paper's shallow network."""

    table = TableNeeds("queue", max_times_sampled=1, replays=True)
    reads_instructions = True
    several_learners = True

    pixel_torso: ClassVar[str] = "shallow"

    algorithm: Literal["impala"] = structural("impala", "IMPALA, actor-critic with V-trace.")
    unroll_steps: StepCount = structural(
        20, "Steps of an unroll. They are sent together; actor.chunk_steps has no effect."
    )
    gamma: float = tunable(0.99, "Discount per step.", ge=0, le=1)
    rho_bar: float | None = tunable(1.0, "Maximum weight of a temporal difference; none = no clipping.", gt=0)
    c_bar: float | None = tunable(1.0, "Maximum weight of a trace; none = no clipping.", gt=0)
    pg_rho_bar: float | None = tunable(1.0, "Maximum weight of a policy gradient; none = no clipping.", gt=0)
    lambda_: float = tunable(1.0, "Factor on the traces, shortening them; 1 as in the paper.", ge=0, le=1)
    reward_clip: policy.RewardClip = tunable(
        "none",
        "Reward in the loss: raw, clipped to [-1, 1], its sign, or squashed with negative rewards scaled "
        "down.",
    )
    baseline_cost: float = tunable(0.5, "Weight of the baseline's loss.", ge=0)
    entropy_cost: float = tunable(
        0.01, "Weight of the entropy bonus; its initial value if it is adjusted.", ge=0
    )
    target_entropy: float | None = tunable(
        None,
        "Target for the mean entropy, in nats, to which the entropy cost is adjusted; none = fixed cost.",
        ge=0,
    )
    entropy_cost_adjustment_speed: float = tunable(10.0, "Speed of that adjustment.", gt=0)
    kl_cost: float = tunable(0.0, "Weight of the divergence from the behaviour policy.", ge=0)
    clear_policy_cost: float = tunable(
        0.0,
        "CLEAR: weight of KL(mu || pi), which keeps the policy close to the one that acted; replayed rows "
        "only.",
        ge=0,
    )
    clear_value_cost: float = structural(
        0.0,
        "CLEAR: weight of the squared change of the value since the step was recorded; replayed rows "
        "only. Above 0, the value of each step is stored.",
        ge=0,
    )
    trust_region: float | None = tunable(
        None,
        "LASER: divergence (`trust_region_of`), in nats, beyond which a replayed step trains neither "
        "policy nor value, and ends traces; none = every step counts.",
        gt=0,
    )
    trust_region_of: Literal["implied", "behaviour"] = tunable(
        "implied",
        "Reference for the divergence of the current policy: `implied`, the policy whose value V-trace "
        "estimates with clipped weights, as in the paper, for a single discrete action; `behaviour`, the "
        "policy that acted.",
    )
    loss_reduction: policy.Reduction = tunable(
        "mean", "Reduction over steps and unrolls: `mean` as in SEED, `sum` as in the original IMPALA."
    )
    optimizer: Literal["rmsprop", "adam"] = structural("rmsprop", "RMSProp (not centred), or Adam.")
    learning_rate: float = tunable(6e-4, "Initial learning rate of the optimiser.", gt=0)
    learning_rate_schedule: Literal["constant", "linear", "polynomial"] = tunable(
        "linear", "linear and polynomial: towards learning_rate_final at run.total_steps."
    )
    rmsprop_decay: float = tunable(0.99, "Smoothing constant of RMSProp.", ge=0, lt=1)
    rmsprop_momentum: float = tunable(0.0, "Momentum of RMSProp.", ge=0, lt=1)
    adam_beta1: float = tunable(0.9, "Smoothing constant of Adam's mean.", ge=0, lt=1)
    adam_beta2: float = tunable(0.999, "Smoothing constant of Adam's square.", ge=0, lt=1)
    optimizer_epsilon: float = tunable(
        0.01, "Term under the root of RMSProp, or added to Adam's denominator.", gt=0
    )
    max_grad_norm: float = tunable(40.0, "Maximum global norm of the gradient; 0 = no clipping.", ge=0)
    behaviour_features: Literal["none", "torso", "head"] = structural(
        "none",
        "Features of the acting network to store with each step, for replay by distance: `torso`, the "
        "inputs of policy and baseline; `head`, the outputs of a layer of `feature_units` before them.",
    )
    feature_units: Units = structural(64, 'Width of the layer of `behaviour_features = "head"`.')
    feature_distance: Distance = tunable(
        "norm",
        "Distance between stored and current features of an unroll, for its priority: `norm`, `cosine` or "
        "`kl`.",
    )
    feature_power: float = tunable(2.0, 'Exponent of `feature_distance = "norm"`.', ge=1, le=64)

    @property
    def of_replayed_rows(self) -> list[str]:
        """See the base class."""
        fields = ("clear_policy_cost", "clear_value_cost", "trust_region")
        return [name for name in fields if getattr(self, name)]


class ImpalaAgent(NetworkAgent):
    """Acts, stores and learns as IMPALA. See `troupe.common.agents.base.Agent` for the methods' contracts."""

    config: ImpalaConfig
    net: ActorCritic

    def __init__(self, config: ImpalaConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        # Its closed form sums over all actions (`implied_kl`), of which real numbers and several choices have
        # too many.
        implied = config.trust_region is not None and config.trust_region_of == "implied"
        if implied and not spec.actions.count:
            raise ConfigError(
                f"agent.trust_region_of implied is for one choice of several, which actions of {spec.id} are "
                "not: set it to behaviour"
            )
        # Before the base class, which makes the network, whose last layer has the distribution's size.
        self.policy = policy_distribution(config, spec)
        super().__init__(config, spec, seed=seed, device=device)

    # ---------------------------------------------------------------- acting

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Actions drawn from the policy with chance `epsilon`, else its most likely ones."""
        params, values, memory, features = self.net.described(*self.step_of(inputs).sequence())
        behaviour = params[0].cpu().numpy()
        # All parameters, not only the probability of the action: KL and cloning on the learner's side need
        # them.
        extras = {"behaviour": behaviour}
        if self.config.behaviour_features != "none":
            # Half the bytes: features are most of an unroll of vectors, and distances do not need more
            # digits.
            extras["features"] = features[0].clamp(-LARGEST_FEATURE, LARGEST_FEATURE).half().cpu().numpy()
        if self.config.clear_value_cost:
            extras["value"] = self.net.in_returns(values[0]).cpu().numpy()
        return self._acted(drawn(self.policy, behaviour, epsilon, rng), extras, inputs, memory)

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
        """See the base class. `weights` are not looked at: V-trace makes up for how old unrolls are."""
        self.learner.rate.follow_progress(batch.progress)
        told: dict[str, Tensor | np.ndarray] = {**batch.fields}
        told.pop("features", None)  # distances to them are found on the CPU
        if batch.replayed is not None:
            told["replayed"] = batch.replayed
        return told

    def learn(self, told: dict[str, Tensor], *, measure: bool) -> dict[str, Tensor]:
        """One step on `[B]` unrolls; `features` are what the network made of them before, where stored."""
        unrolls = self.stored.read(told)
        stored = told["value"].T if self.config.clear_value_cost else None
        loss, measured, features = self._loss(unrolls, stored)
        norm = self.learner.step(loss)
        # After the step: the next update sees pixels as actors do with what is published now. Where they are
        # behind, V-trace corrects for statistics as for weights: it has the policy that they acted by.
        # The first observation of an unroll is the last of the one before it: each counts once.
        self.net.observe(unrolls.obs[1:])
        found = {}
        if measure:
            found = {f"learner/{name}": value.detach() for name, value in measured.items()}
            found["learner/grad_norm"] = norm
        if self.config.behaviour_features != "none":
            found["features"] = features[:-1].detach().transpose(0, 1)
        return found

    def made(self, batch: Batch, found: Mapping[str, Tensor]) -> Update:
        """See the base class.

        Where features are stored, priorities are how near they are to what the network made of the same
        observations before this step: 1 for the same.
        """
        update = super().made(batch, found)
        if "features" not in found:
            return update
        distance = self.distances(batch.fields["features"], found["features"].numpy())
        metrics = update.metrics
        if batch.measure:
            # Fresh unrolls are near by nature; only replayed ones say whether features drift.
            old = distance if batch.replayed is None else distance[batch.replayed]
            metrics = metrics | {"learner/feature_distance": float(old.mean()) if len(old) else 0.0}
        return Update(nearness(distance), metrics)

    @torch.inference_mode()
    def features(self, fields: Mapping[str, np.ndarray | Tensor]) -> np.ndarray:
        """See `troupe.common.agents.base.Featured`."""
        found = self._described(self.stored.read(fields))[3]
        return found[:-1].transpose(0, 1).float().cpu().numpy()

    def distances(self, stored: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        """See `troupe.common.agents.base.Featured`."""
        return distances(self.config.feature_distance, fresh, stored, self.config.feature_power)

    def _described(self, unrolls: Unrolls) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the network makes of unrolls: see `ActorCritic.described`."""
        return self.net.described(
            unrolls.obs, unrolls.last_action, unrolls.last_reward, unrolls.ended != 0, unrolls.memory
        )

    def _loss(
        self, unrolls: Unrolls, stored_values: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The loss, scalars that say of what it is, and the features `[T + 1, B, F]` of the observations.

        `stored_values` `[T, B]` are what the network that acted made of the observations, if that is known.
        """
        config, replayed = self.config, unrolls.replayed
        params, values, _, features = self._described(unrolls)
        params = params[:-1]
        actions = unrolls.last_action[1:]
        log_probs = self.policy.log_prob(params, actions)
        # The mean of log(mu / pi) over actions of mu estimates KL(mu || pi): with its gradient it is the term
        # of `kl_cost`.
        log_ratio = self.policy.log_prob(unrolls.behaviour, actions) - log_probs
        trusted = self._trusted(params.detach(), unrolls)
        # Targets are constants: V-trace has no gradient, and one through the values would teach them to meet
        # themselves.
        in_returns = self.net.in_returns(values.detach())
        corrected = self._corrected(unrolls, -log_ratio.detach(), in_returns, trusted)
        advantages, targets = corrected.advantages, corrected.targets
        if (returns := self.net.returns) is not None:
            self.net.observe_returns(targets)
            # Policy and baseline learn on the same scale, whatever that of rewards (Hessel et al. 2019,
            # equation 8).
            advantages, targets = advantages / returns.deviation.float(), returns(targets)
            stored_values = None if stored_values is None else returns(stored_values)
            # Anew: the last layer has just been changed, and what it said before has no gradient through it.
            values = self.net.head.value(features)
        entropy = self.policy.entropy(params)
        gradient = policy.policy_gradient(log_probs, advantages)
        baseline = 0.5 * (targets - values[:-1]).square()
        terms = gradient + config.baseline_cost * baseline + config.kl_cost * log_ratio
        measured = {}
        if replayed is not None:
            to_today = self.policy.kl(unrolls.behaviour, params)
            costs = {"policy_cost": config.clear_policy_cost, "value_cost": config.clear_value_cost}
            # From mu to pi, the direction that punishes today's policy for forgetting an action that mu took.
            clones = cloning(to_today, values[:-1], stored_values, replayed, **costs)
            terms = terms + clones
            measured = _of_replayed(replayed, to_today.detach(), clones.detach(), trusted)
        entropy_cost = self.learner.entropy_cost.value().detach()
        loss = policy.reduced(terms - entropy_cost * entropy, config.loss_reduction)
        if config.loss_reduction == "sum":
            loss = self.learner.reduction.scaled_sum(loss)
        loss = loss + self.learner.entropy_cost.adjustment(entropy.mean())
        measured |= {
            "loss": loss,
            "policy_loss": gradient.mean(),
            "baseline_loss": baseline.mean(),
            "entropy": entropy.mean(),
            "entropy_cost": entropy_cost,
            "value_mean": values.mean(),
            "explained_variance": explained_variance(targets - values[:-1], targets),
            "behaviour_kl": log_ratio.mean(),
        }
        return loss, measured, features

    def _trusted(self, params: Tensor, unrolls: Unrolls) -> Tensor | None:
        """Which steps `[T, B]` count; None where all do."""
        if unrolls.replayed is None or self.config.trust_region is None:
            return None
        if self.config.trust_region_of == "implied":
            divergence = implied_kl(params, unrolls.behaviour, self.config.rho_bar)
        else:
            divergence = self.policy.kl(params, unrolls.behaviour)
        return trusted_steps(divergence, self.config.trust_region, unrolls.replayed)

    def _corrected(
        self, unrolls: Unrolls, log_rhos: Tensor, values: Tensor, trusted: Tensor | None
    ) -> VTrace:
        """V-trace targets and advantages `[T, B]` for values `[T + 1, B]`."""
        config = self.config
        rewards = policy.clip_reward(unrolls.last_reward[1:], config.reward_clip)
        rewards, discounts, following, continues = unrolls.outcomes_with(rewards, values, config.gamma)
        return vtrace(
            log_rhos,
            rewards,
            discounts,
            values[:-1],
            following,
            continues,
            rho_bar=config.rho_bar,
            c_bar=config.c_bar,
            pg_rho_bar=config.pg_rho_bar,
            lambda_=config.lambda_,
            trusted=trusted,
        )

    # ----------------------------------------------------------------- parts

    def _network(self) -> ActorCritic:
        config, spec = self.config, self.spec
        bottleneck = config.feature_units if config.behaviour_features == "head" else 0

        def make(torso: str) -> ActorCritic:
            options = body_options(config, spec) | policy_options(config, self.policy, spec)
            return ActorCritic(spec.seen_shape, spec.actions, torso, bottleneck=bottleneck, **options)

        return suited(config, spec, make)

    @cached_property
    def stored(self) -> StoredUnrolls:
        """See the base class. CLEAR needs the values, replay by distance the features."""
        config = self.config
        return StoredUnrolls(
            self.spec,
            config.unroll_steps,
            self.net.state_size,
            staggered=config.allowed_staleness is None,
            behaviour_size=self.policy.size,
            feature_size=0 if config.behaviour_features == "none" else self.net.head_features,
            values=config.clear_value_cost > 0,
            device=self.device,
        )

    @cached_property
    def learner(self) -> ImpalaLearner:
        """See the base class."""
        return ImpalaLearner(self.config, self.net, self.device)


def _of_replayed(
    replayed: Tensor, divergence: Tensor, clones: Tensor, trusted: Tensor | None
) -> dict[str, Tensor]:
    """Means over the steps of `replayed` rows, for the log."""
    share = replayed.float().mean().clamp(min=1e-6)  # of a batch without any, all of them are 0
    measured = {"replayed_kl": (divergence * replayed).mean() / share, "cloning_loss": clones.mean() / share}
    if trusted is not None:
        measured["untrusted_share"] = (~trusted).float().mean() / share
    return measured


class ImpalaLearner(Learner):
    """Adds the entropy cost, and a learning rate that changes."""

    def __init__(self, config: ImpalaConfig, net: nn.Module, device: torch.device) -> None:
        self.entropy_cost = Multiplier(
            config.entropy_cost,
            config.target_entropy,
            at_most=False,
            speed=config.entropy_cost_adjustment_speed,
        ).to(device)
        parameters = [*net.parameters(), *self.entropy_cost.parameters()]
        super().__init__(net, _optimizer(config, parameters), config.max_grad_norm)
        self.rate = LearningRate(config, self.optimizer)

    def metrics(self) -> dict[str, float]:
        """See `Learner`: the learning rate."""
        return {"learner/learning_rate": self.rate.value}

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Learner`; a fixed cost is what the configuration says now."""
        adjusted = module_arrays(self.entropy_cost)
        # The name is older than `Multiplier`: checkpoints of begun runs have it.
        return {"log_entropy_cost": adjusted["position"].copy()} if adjusted else {}

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """See `Learner`."""
        if self.entropy_cost.target is not None:
            self.entropy_cost.load_state_dict(tensors({"position": arrays["log_entropy_cost"]}))


def _optimizer(config: ImpalaConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if config.optimizer == "adam":
        betas = (config.adam_beta1, config.adam_beta2)
        return Adam(
            parameters, lr=config.learning_rate, betas=betas, eps=config.optimizer_epsilon, fused=True
        )
    return RMSProp(
        parameters,
        lr=config.learning_rate,
        decay=config.rmsprop_decay,
        epsilon=config.optimizer_epsilon,
        momentum=config.rmsprop_momentum,
    )


make = ImpalaAgent
"""What the registry calls."""
