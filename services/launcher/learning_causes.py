"""What may keep a run from learning: how loud that is, and the figures of its words."""

from __future__ import annotations

import math
from typing import Any

from troupe.services.launcher.causes import Figures
from troupe.services.launcher.evidence import Evidence

WIDE = 20.0
"""Inputs whose mean and three deviations reach beyond this: first weights are made for numbers around 1."""
OFFSET = 5.0
"""A mean of so many deviations: the network sees a constant, and almost nothing beside it."""
LARGE, SMALL = 100.0, 0.003
"""Rewards beyond these are far from the scale that step sizes and clips are made for."""
NORMALISERS = ("normalize_returns", "normalize_rewards")
"""Fields of agents with which they learn alike from rewards of any size."""
MIN_SIZE = 1e-100
"""What is as good as zero: one divided by it is no figure."""
STEP_SIZE = 0.05
"""Share of the weights' size that a step may change: usual are a thousandth to a hundredth."""
FLAT = 0.1
"""Share of the largest entropy that is hardly any."""
UNITS = 0.5
"""Share of a layer's units without which it is another, narrower layer."""
UNSEEN = 0.7
"""Chance that an end looks most like another end, below which it does not show in observations."""
LONG = 20.0
"""Episodes of the same length that are shorter are usual games."""
HORIZONS = 2.0
"""Times `1 / (1 - gamma)` from one reward to the next: beyond, less than an eighth of it is left."""
FALLEN = 0.6
"""Share of its rise that a run has lost."""
SEVERAL = 3
"""Returns without which a mean of them is no ground for saying that they have fallen."""
OLD_ON_POLICY, OLD = 4.0, 32.0
"""Versions by which fresh experience may be old: of several passes over it, and of one with V-trace."""
BOUND = 0.8
"""Share of an action's numbers at their bounds, of which the policy learns nothing."""
BATCHES = 8.0
"""Batches that a table has to hold so that two of them differ."""
REPEATS = 512.0
"""Times that an item is learned from, on average, beyond which it is learned by heart."""


ENDLESS = 5_000
"""Steps of each slot after which an episode should have ended: most of random play are far shorter."""
FAILED, FEW_FAILED = 0.2, 5
"""Share of the episodes that an environment may not finish without being the fault, and a number of them that
may be chance."""


def _over(value: float, limit: float) -> float:
    """0 where a value is at its limit, 1 where it is ten times that, 2 at a hundred times."""
    return math.log10(max(1e-9, value / limit))


def _loud(least: float, over: float) -> float:
    return min(0.95, least + 0.15 * max(0.0, over))


def learner_dies(run: Evidence) -> Figures | None:
    """What learns does not live."""
    return (0.99, {"error": run.learner_error}) if run.learner_error else None


def failing_episodes(run: Evidence) -> Figures | None:
    """Episodes end in exceptions, and not as they should."""
    told = run.environments
    failed, ended = told.get("failures"), told.get("episodes")
    # Earlier versions have not counted the others.
    if not isinstance(failed, int) or not isinstance(ended, int):
        return None
    if failed < FEW_FAILED or failed < FAILED * (failed + ended):
        return None
    share = failed / (failed + ended)
    env = run.config.env.id if run.config is not None else "ID"
    figures = {
        "share": share,
        "failed": failed,
        "begun": failed + ended,
        "last": told.get("last"),
        "env": env,
    }
    return 0.6 + 0.35 * share, figures


def endless_episodes(run: Evidence) -> Figures | None:
    """No episode has ended, and none has failed: there is nothing to tell progress by."""
    if run.config is None or run.config.run.offline or run.environments.get("failures"):
        return None
    if run.returns or run["train/episode_return"] is not None:
        return None
    steps = run.steps / run.config.total_slots
    limit = run.config.env.max_episode_frames
    return (0.5, {"steps": steps, "limit": limit}) if steps >= ENDLESS else None


def inputs(run: Evidence) -> Figures | None:
    """The network sees large numbers, or a constant."""
    means, deviations = run.all("learner/seen_mean"), run.all("learner/seen_deviation")
    # Not by the least and the most: single numbers far away, such as contact forces, are how many tasks are.
    sizes = {part: abs(mean) + 3.0 * deviations.get(part, 0.0) for part, mean in means.items()}
    if not sizes:
        return None
    part = max(sizes, key=sizes.__getitem__)
    mean, deviation = means[part], deviations.get(part, 0.0)
    figures: dict[str, Any] = {
        "part": f" in {part}" if part else "",
        "least": run.all("learner/seen_least").get(part, mean),
        "most": run.all("learner/seen_most").get(part, mean),
        "mean": mean,
        "deviation": deviation,
        "advice": _normalise(run),
    }
    if sizes[part] >= WIDE:
        return _loud(0.6, _over(sizes[part], WIDE)), figures
    if abs(mean) >= OFFSET * deviation and abs(mean) > 0.5:
        return 0.5, figures
    return None


def _normalise(run: Evidence) -> str:
    if run.option("normalize_vectors") is False:
        return "--agent.normalize_vectors true in a new run"
    return "divide observations in the environment, so that they are within -1 and 1"


def reward_scale(run: Evidence) -> Figures | None:
    """Rewards are far from 1."""
    size, raw = run["learner/reward_size_learned"], run["learner/reward_size"]
    adapts = any(run.option(option) for option in NORMALISERS)
    if size is None or size <= MIN_SIZE or not raw or adapts:
        return None
    ratio = size / (run.option("reward_scale", 1.0) or 1.0)
    scale = 10.0 ** -round(math.log10(ratio))
    figures = {"size": size, "raw": raw, "advice": _scale(run, scale)}
    if size >= LARGE and not run.option("rescaling_epsilon"):  # which makes large values small
        return _loud(0.6, _over(size, LARGE)), figures
    return (_loud(0.5, _over(SMALL, size)), figures) if size <= SMALL else None


def _scale(run: Evidence, scale: float) -> str:
    advice = [f"--agent.{option} true in a new run" for option in NORMALISERS if run.has(option)]
    if run.has("reward_scale"):
        advice.insert(0, f"--agent.reward_scale {scale:g}")
    if not advice:
        advice = [f"multiply rewards by {scale:g} in the environment", "--env.reward_clip sign"]
    return ", or ".join(advice)


def learning_rate(run: Evidence) -> Figures | None:
    """A step changes the weights by much."""
    size, rate = run.peak("learner/step_size"), run.peak("learner/learning_rate") or 0.0
    if size is None or size < STEP_SIZE:
        return None
    less = 10.0 ** math.floor(math.log10(max(1e-12, rate * 0.1 * STEP_SIZE / size)))
    return _loud(0.65, _over(size, STEP_SIZE)), {"share": size, "rate": rate, "less": less}


def entropy(run: Evidence) -> Figures | None:
    """The policy does the same always, and this is not what it has learned."""
    share = run["learner/entropy_share"]
    if share is None or share >= FLAT:
        return None
    advice = "a larger --agent.entropy_cost"
    if run.option("target_entropy") is not None:
        advice = "a larger --agent.target_entropy"
    if run.option("policy_gain", 0.0) > 1.0:
        advice += ", or --agent.policy_gain 0.01 in a new run"
    return 0.75 * (1.0 - run.learned), {"share": share, "advice": advice}


def dead_units(run: Evidence) -> Figures | None:
    """Units of a layer never switch."""
    layer, share = run.worst("learner/dead_share")
    figures: dict[str, Any] = {
        "layer": layer,
        "share": share,
        "how": "give the same output for all observations",
    }
    other, saturated = run.worst("learner/saturated_share")
    if saturated > share:
        share, figures = saturated, {"layer": other, "share": saturated, "how": "are at -1 or 1"}
    if share < UNITS:
        return None
    norm = ", or --agent.layer_norm true" if run.option("layer_norm") is False else ""
    figures["advice"] = f"a new run with a smaller --agent.learning_rate{norm}"
    return (0.4 + 0.4 * share) * (1.0 - 0.8 * run.learned), figures


def time_limit(run: Evidence) -> Figures | None:
    """Episodes end at a fixed step, which nothing shows, and are told as terminations."""
    shortest, longest = run["train/episode_length_min"], run["train/episode_length_max"]
    # Of the whole run: slots that step together end together, which most batches do not see.
    ended, cut = run.peak("learner/terminated_share"), run.peak("learner/truncated_share")
    seen = run["learner/ends_seen_share"]
    if shortest is None or shortest != longest or shortest < LONG or seen is None:
        return None
    if not ended or cut or seen >= UNSEEN or run.option("lstm_units"):
        return None
    return 0.8, {"steps": longest, "seen": seen}


def discount(run: Evidence) -> Figures | None:
    """Rewards are farther apart than the discount lets the agent see."""
    share, gamma = run["learner/reward_share"], run.option("gamma")
    if share is None or share <= MIN_SIZE or gamma is None or gamma >= 1.0 or run.option("gamma_per_frame"):
        return None
    gap = 1.0 / share
    if gap * (1.0 - gamma) < HORIZONS:
        return None
    better = 1.0 - 10.0 ** math.floor(math.log10(1.0 / gap))
    left = gamma**gap
    return _loud(0.65, _over(gap * (1.0 - gamma), HORIZONS)), {
        "gap": gap,
        "gamma": gamma,
        "left": left,
        "better": better,
    }


def stale(run: Evidence) -> Figures | None:
    """What should be fresh has waited."""
    age = run["replay/sampled_staleness"]
    if age is None or not any(table.is_queue for table in run.tables) or len(run.tables) > 1:
        return None
    limit = OLD_ON_POLICY if run.has("epochs") else OLD
    if age < limit:
        return None
    advice = "a smaller capacity of the queue in [[replay.tables]], or more learning for each step acted"
    if run.has("max_staleness"):
        advice = "--agent.max_staleness 1, and a queue of about one batch in [[replay.tables]]"
    return _loud(0.65, _over(age, limit)), {"age": age, "advice": advice}


def at_bounds(run: Evidence) -> Figures | None:
    """Nearly all actions are clipped."""
    share = run["learner/action_at_bounds_share"]
    if share is None or share < BOUND:
        return None
    advice = "less --agent.entropy_cost"
    if run.option("action_distribution") == "normal":
        advice = "a smaller --agent.deviation_start, or --agent.action_distribution tanh_normal, in a new run"
    return (0.75 + 0.2 * share) * (1.0 - 0.7 * run.learned), {"share": share, "advice": advice}


def small_replay(run: Evidence) -> Figures | None:
    """Replay holds little more than a batch."""
    if run.config is None or run.config.run.offline or any(table.is_queue for table in run.tables):
        return None  # a data set is as large as it is, and nothing of it is lost
    capacity, batch = sum(table.capacity for table in run.tables), run.config.replay.batch_size
    batches = capacity / batch
    if batches >= BATCHES:
        return None
    figures = {"capacity": capacity, "batch": batch, "more": 100 * batch}
    return _loud(0.7, _over(BATCHES, batches)), figures


def repeats(run: Evidence) -> Figures | None:
    """Each item is learned from very often."""
    if any(table.is_queue for table in run.tables):
        return None
    inserted, sampled = run["replay/inserts_per_s"], run["replay/samples_per_s"]
    if not inserted or not sampled or sampled < REPEATS * inserted:
        return None
    return _loud(0.5, _over(sampled / inserted, REPEATS)), {"times": sampled / inserted}


def values(run: Evidence) -> Figures | None:
    """Values are larger than any return."""
    value = run["learner/q_mean"]
    value = run["learner/value_mean"] if value is None else value
    gamma, length = run.option("gamma", 1.0), run["train/episode_length"]
    if value is None or not run.returns or length is None or length < 1.0 or run.option("normalize_returns"):
        return None
    if run.has("rescaling_epsilon") or run.option("entropy_cost", 0.0) or run.option("munchausen_alpha"):
        return None  # worth more than its rewards
    scale = run.option("reward_scale", 1.0) or 1.0
    size = run["learner/reward_size_learned"]
    if run.config is None or size is None or size <= MIN_SIZE:
        return None
    # Nothing can be worth more than the largest reward in each step from here on.
    most = size / max(1.0 - gamma, 1.0 / length)
    if abs(value) <= 1.5 * most:
        return None
    return _loud(0.6, _over(abs(value), most)), {"value": value, "most": most, "scale": scale}


def policy_moves(run: Evidence) -> Figures | None:
    """A batch moves the policy far from where it was."""
    share, kl = run["learner/clipped"], run["learner/behaviour_kl"] or 0.0
    if share is None or share < 0.5:
        return None
    return (0.4 + 0.4 * share) * (1.0 - 0.5 * run.learned), {"share": share, "kl": kl}


def gradients(run: Evidence) -> Figures | None:
    """The gradient is far larger than what it is clipped to."""
    norm, limit = run["learner/grad_norm"], run.option("max_grad_norm")
    if not norm or not limit or norm < 100.0 * limit:
        return None
    return _loud(0.35, _over(norm, 100.0 * limit)) * (1.0 - run.learned), {"norm": norm, "limit": limit}


def unexplained(run: Evidence) -> Figures | None:
    """Values say nothing of what comes."""
    share = run["learner/explained_variance"]
    if share is None or share >= 0.05:
        return None
    return 0.35 * (1.0 - run.learned), {"share": share}


def exploration(run: Evidence) -> Figures | None:
    """Nothing is tried any more."""
    epsilon = run["learner/epsilon"]
    if epsilon is None or epsilon > 0.005:
        return None
    return 0.4 * (1.0 - run.learned), {"epsilon": epsilon}


def fallen(run: Evidence) -> Figures | None:
    """Returns rose, and most of that is lost again."""
    course = run.course
    if course is None or course.part < SEVERAL or not course.rose or 1.0 - run.learned < FALLEN:
        return None
    # A share of a small rise may be chance again.
    if course.best - course.last <= 5.0 * course.chance:
        return None
    advice = (
        "a smaller --agent.learning_rate" if run.has("learning_rate") else "smaller steps of the optimiser"
    )
    figures = {"best": course.best, "steps": course.best_steps, "last": course.last, "advice": advice}
    return 0.35, figures  # quiet: whatever says why they fell comes first
