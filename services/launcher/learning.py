"""Why a run does not learn: one table, for `troupe why`, `troupe doctor`, the panel and its page in docs."""

from __future__ import annotations

from troupe.services.launcher import learning_causes as causes
from troupe.services.launcher.evidence import LOG, Evidence, of_view
from troupe.services.launcher.findings import Finding, Row
from troupe.services.launcher.view import RunView

FROM = 0.3
"""Loudness from which on a fault is named: below, it may be how the task is."""


Fault = Row[Evidence, str]
"""Something that may keep a run from learning; its threshold is in words, for the page, and counts from FROM
on. `words` say why it matters, too."""


def faults(run: Evidence) -> list[Finding]:
    """What keeps a run from learning, the likeliest first; empty where nothing is found."""
    found = []
    for fault in FAULTS:
        measured = fault.measure(run)
        if measured is not None and measured[0] >= FROM:
            found.append(fault.found(*measured))
    return sorted(found, key=lambda finding: -finding.loudness)


def first_fault(view: RunView) -> Finding | None:
    """The likeliest cause of a running run not learning, as far as its newest values tell."""
    found = faults(of_view(view)) if view.updates or view.trouble else []
    return found[0] if found else None


FAULTS = (
    Fault(
        "learner-dies",
        "there are no updates, or the run has ended with an error",
        causes.learner_dies,
        (LOG,),
        "it ended with an error, and there has been no update since",
        "the learner died with an error, and there has been no update since: {error}",
        f"{LOG} has the traceback; troupe train --serial shows it at once, and a debugger stops there",
        f"fix the line that it names: {LOG} has the traceback, and `troupe train --serial` shows it at once",
    ),
    Fault(
        "failing-episodes",
        "there are few returns or none, no evaluation ends, and the panel counts failures of environments",
        causes.failing_episodes,
        ("actor/env_restarts_total", "train/episodes"),
        f"{causes.FAILED:.0%} of the episodes, {causes.FEW_FAILED} or more",
        "{share:.0%} of the episodes ({failed:,} of {begun:,}) ended with a failure of the environment, "
        "and their unstored steps were discarded; the last: {last}",
        "fix it there, then test for longer with troupe env check {env} --steps 10000; see logs/actor-0.log",
        "fix the line that it names, then test for longer with `troupe env check ID --steps 10000`",
    ),
    Fault(
        "endless-episodes",
        "there are no returns, and no evaluation ends",
        causes.endless_episodes,
        ("train/episode_return",),
        f"no episode has ended in {causes.ENDLESS:,} steps of each slot, and none has failed",
        "no episode has ended in {steps:,.0f} steps of each slot: nothing shows whether the agent "
        "learns, and evaluations take very long",
        "return truncated from the environment when its time is up, or set smaller --env.max_episode_frames "
        "(it is {limit:,}) and --evaluator.max_episode_frames in a new run",
        "return truncated from the environment when its time is up, or set smaller "
        "--env.max_episode_frames and --evaluator.max_episode_frames in a new run",
    ),
    Fault(
        "inputs",
        "returns stay at the level of random play, and the loss is large or does not move",
        causes.inputs,
        ("learner/seen_mean", "learner/seen_deviation", "learner/seen_least", "learner/seen_most"),
        f"mean and three standard deviations beyond {causes.WIDE:g}, or a mean of {causes.OFFSET:g} of them",
        "the network sees numbers from {least:.3g} to {most:.3g}{part} (mean {mean:.3g}, standard deviation "
        "{deviation:.3g}): its units saturate, or see a constant",
        "{advice}",
        "--agent.normalize_vectors true, or smaller numbers from the environment",
    ),
    Fault(
        "time-limit",
        "values never fit, although the task is simple",
        causes.time_limit,
        (
            *("train/episode_length_min", "train/episode_length_max", "learner/terminated_share"),
            *("learner/truncated_share", "learner/ends_seen_share"),
        ),
        f"all episodes have the same length, {causes.LONG:g} steps or more, and their ends look like any "
        "other step",
        "every episode terminates after {steps:,.0f} steps, and the observation does not show it (ends look "
        "alike in {seen:.0%} of cases, and chance is 50 %): values treat a time limit as the end of "
        "all rewards",
        "return truncated, not terminated, from the environment when its time is up",
    ),
    Fault(
        "learning-rate",
        "returns fall or jump, and the loss grows",
        causes.learning_rate,
        ("learner/step_size", "learner/learning_rate"),
        f"a step changes the weights by {causes.STEP_SIZE:.0%}",
        "a step of the optimiser changes the weights by {share:.1%} at learning rate {rate:.3g} (usual: 0.1 "
        "to 1 %): it destroys what was learned",
        "a smaller --agent.learning_rate, such as {less:.0e}",
        "a smaller --agent.learning_rate",
    ),
    Fault(
        "reward-scale",
        "loss and gradients are huge, or nothing changes",
        causes.reward_scale,
        ("learner/reward_size", "learner/reward_size_learned"),
        f"rewards of {causes.LARGE:g} or more, or of {causes.SMALL:g} or less, not normalised",
        "rewards are up to {raw:.3g} in size, {size:.3g} after scaling: step sizes and clipping "
        "assume about 1",
        "{advice}",
        "--agent.reward_scale, --agent.normalize_rewards true or --agent.normalize_returns true, or "
        "--env.reward_clip sign",
    ),
    Fault(
        "small-replay",
        "returns rise and then fall again",
        causes.small_replay,
        (),
        f"room for fewer than {causes.BATCHES:g} batches",
        "replay holds {capacity:,} items for batches of {batch:,}: all are from the same moment, and older "
        "experience is lost",
        "a larger --replay.capacity_items in a new run, such as {more:,}",
        "a larger --replay.capacity_items",
    ),
    Fault(
        "stale",
        "returns stop rising, or fall, while the policy changes",
        causes.stale,
        ("replay/sampled_staleness",),
        f"{causes.OLD_ON_POLICY:g} versions for several passes, {causes.OLD:g} for IMPALA",
        "experience is {age:.0f} versions old when it is learned from: it comes from another policy",
        "{advice}",
        "--agent.max_staleness 1, and a queue of about one batch in [[replay.tables]]",
    ),
    Fault(
        "discount",
        "late rewards are never earned",
        causes.discount,
        ("learner/reward_share",),
        f"rewards are {causes.HORIZONS:g} horizons, 1 / (1 - gamma), apart",
        "rewards come every {gap:.0f} steps, over which gamma {gamma:g} leaves {left:.1g} of their "
        "value: the "
        "steps that lead to them get no credit",
        "a larger --agent.gamma, such as {better:g}",
        "a larger --agent.gamma",
    ),
    Fault(
        "at-bounds",
        "actions jump between their bounds",
        causes.at_bounds,
        ("learner/action_at_bounds_share",),
        f"{causes.BOUND:.0%} of the action components, and returns have not risen",
        "{share:.0%} of the action components are at or beyond their bounds, which clip them: the policy "
        "learns from actions that were never taken",
        "{advice}",
        "--agent.action_distribution tanh_normal, or a smaller --agent.deviation_start",
    ),
    Fault(
        "entropy",
        "the agent always does the same thing, and returns stay low",
        causes.entropy,
        ("learner/entropy_share", "train/episode_return"),
        f"{causes.FLAT:.0%} of the maximum entropy, and returns have not risen",
        "the policy's entropy is {share:.1%} of the maximum, and returns have not risen: the agent tries "
        "nothing new",
        "{advice}",
        "a larger --agent.entropy_cost or --agent.target_entropy, a smaller --agent.policy_gain",
    ),
    Fault(
        "dead-units",
        "loss and returns stop changing",
        causes.dead_units,
        ("learner/dead_share", "learner/saturated_share", "train/episode_return"),
        f"{causes.UNITS:.0%} of a layer's units",
        "{share:.0%} of the units of {layer} {how}: they get no gradient, and do not recover",
        "{advice}",
        "a new run with a smaller --agent.learning_rate, or --agent.layer_norm true",
    ),
    Fault(
        "values",
        "Q grows without bound",
        causes.values,
        ("learner/q_mean", "learner/value_mean", "learner/reward_size_learned", "train/episode_length"),
        "1.5 times what the largest reward in every step would be worth",
        "values are {value:.3g} on average, although nothing can be worth more than {most:.3g}: they diverge",
        "a smaller --agent.learning_rate, or updating the target network less often",
    ),
    Fault(
        "policy-moves",
        "returns rise, then fall",
        causes.policy_moves,
        ("learner/clipped", "learner/behaviour_kl"),
        "half of the steps are clipped",
        "an update moves the policy beyond the clip in {share:.0%} of the steps (KL {kl:.2g}): nothing is "
        "learned from these",
        "a smaller --agent.learning_rate, or fewer --agent.epochs",
    ),
    Fault(
        "repeats",
        "returns rise and then fall again, although errors are small",
        causes.repeats,
        ("replay/samples_per_s", "replay/inserts_per_s"),
        f"{causes.REPEATS:g} uses per item",
        "each item is learned from {times:,.0f} times: the network overfits to them",
        "a smaller --replay.samples_per_insert, or more actors",
    ),
    Fault(
        "exploration",
        "the agent always does the same thing",
        causes.exploration,
        ("learner/epsilon", "train/episode_return"),
        "random actions below 0.5 %, and returns have not risen",
        "only {epsilon:.2%} of the actions are random, and returns have not risen: the agent tries nothing "
        "new",
        "a larger --agent.epsilon_final or --agent.epsilon_share",
    ),
    Fault(
        "unexplained",
        "returns do not rise",
        causes.unexplained,
        ("learner/explained_variance", "train/episode_return"),
        "below 0.05, and returns have not risen",
        "values explain {share:.0%} of the variance of their targets: advantages are noise",
        "a larger --agent.baseline_cost or --agent.learning_rate, or a network that sees more",
    ),
    Fault(
        "gradients",
        "the loss jumps",
        causes.gradients,
        ("learner/grad_norm", "train/episode_return"),
        "100 times the clip, and returns have not risen",
        "gradients of {norm:.3g} are clipped to {limit:g}: the loss has the wrong scale",
        "smaller rewards, or a larger --agent.max_grad_norm",
    ),
    Fault(
        "fallen",
        "returns rise, then fall",
        causes.fallen,
        ("train/episode_return",),
        f"{causes.FALLEN:.0%} of the rise is lost again, and more than chance explains",
        "the return rose to {best:.3g} by step {steps:,.0f} and has fallen to {last:.3g} since: steps of the "
        "optimiser may be too large",
        "{advice}",
        "a smaller --agent.learning_rate",
    ),
)
"""What may keep a run from learning. What a user can mend directly comes before what follows from it."""
