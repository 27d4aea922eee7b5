"""Plays games of one policy against another: the results by which versions are rated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from troupe.common.agents import Agent, Inputs
from troupe.common.agents.opponents import with_others
from troupe.common.config import EnvConfig
from troupe.common.envs import copy_slots, make_vector
from troupe.common.envs.base import clip_rewards
from troupe.common.envs.sides import Sides, score


def play_match(
    agent: Agent,
    other: Agent,
    env: EnvConfig,
    *,
    games: int,
    slots: int,
    seed: int,
    epsilon: float,
    max_episode_frames: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[float] | None:
    """Play games in which `agent` has one side and `other` all others.

    Both explore alike. `agent` has each side in as many games. Every copy plays a number of games that is
    fixed beforehand, as in `troupe.services.evaluator.games.play`.

    Args:
        agent: only acts.
        other: the same.
        env: the run's environment.
        games: rounded up to a multiple of the sides.
        slots: stepped together; at least one copy.
        seed: of the games and of the exploration.
        epsilon: chance of exploring, see `Agent.act`.
        max_episode_frames: as in `play`.
        should_stop: looked at before every step.

    Returns:
        The score of `agent` in each game (1 for a win, 0.5 for a draw), in the order of the games; None if
        stopped early. A game in which one side took no part is left out.
    """
    per_copy = copy_slots(env)
    env = env.model_copy(update={"max_episode_frames": max_episode_frames})
    game_seed, action_seed = np.random.SeedSequence(seed).generate_state(2)
    rng = np.random.default_rng(action_seed)
    copies = max(1, min(games, slots // per_copy))
    vector = make_vector(env, copies * per_copy, int(game_seed) >> 1, evaluation=True)
    try:
        sides = Sides(vector.spec, vector.num_slots)
        games = -(-games // sides.count) * sides.count
        numbers, scores = list(range(copies)), [None] * games  # type: list[int], list[float | None]
        inputs = Inputs.start(vector.reset(), agent.memory_size, vector.spec.actions)
        epsilons = np.full(vector.num_slots, epsilon, np.float32)
        while any(number < games for number in numbers):
            if should_stop():
                return None
            away = [slot for copy in range(copies) for slot in sides.away(copy, numbers[copy] % sides.count)]
            act = agent.act(inputs, epsilons, rng)
            act = with_others(act, [(other, away)], inputs, epsilons, rng)
            step = vector.step(act.action)
            ended = step.terminated | step.truncated
            ended[step.discarded + step.idle] = True
            inputs = inputs.after(act, step.obs, clip_rewards(step.reward, env.reward_clip), ended)
            for copy, returns in sides.take(step).items():
                number = numbers[copy]
                if returns is None:
                    continue  # the environment has failed: the game begins again
                if number < games:
                    scores[number] = score(returns, number % sides.count)
                numbers[copy] += copies
        return [each for each in scores if each is not None]
    finally:
        vector.close()
