"""Stepping environments: Troupe's vectors beside the bare libraries, in one thread; scores of random play.

`python -m benchmarks.envs --json [--seconds S] [--ids atari:pong,minatar:breakout] [--slots 8] [--games 2]`
`python -m benchmarks.envs --seconds 0 --games 3 --ids atari:pong,atari:alien`: scores alone

Rates are steps of all slots per second of processor time, so that other programs matter less. Both sides take
turns, with the same actions: the bare one steps its copies one by one (Atari's is ale-py's own vectoriser)
and resets those whose episode is over; it makes nothing of what comes back.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import parser, report
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import EnvSpec, make_spec, make_vector
from troupe.common.envs.base import VectorEnv, slot_seeds
from troupe.common.errors import MissingEngineError
from troupe.common.runtime.parser import integer
from troupe.common.stats.scores import random_and_human

IDS = (
    *("atari:pong", "atari:breakout", "gym:CartPole-v1", "gym:Pendulum-v1"),
    *("mujoco:HalfCheetah-v5", "mujoco:Hopper-v5", "dm_control:walker-walk"),
    *(f"minatar:{game}" for game in ("breakout", "asterix", "freeway", "seaquest", "space_invaders")),
)
TURNS = 25
ACTIONS = 256
"""Rows that are drawn ahead and used again, so that drawing them is not measured."""

Bare = Callable[[Any], object]
"""Takes the actions of all slots."""


def one_by_one(envs: list[Any], step: Callable[[Any, Any], bool], reset: Callable[[Any], object]) -> Bare:
    """Steps each copy, and resets it where `step` says that its episode is over."""

    def all_of_them(actions: Any) -> None:
        for env, action in zip(envs, actions, strict=True):
            if step(env, action):
                reset(env)

    return all_of_them


def bare_gymnasium(config: EnvConfig, slots: int) -> Bare:
    import gymnasium

    name = config.id.partition(":")[2]
    envs = [gymnasium.make(name, disable_env_checker=True) for _ in range(slots)]
    for env, seed in zip(envs, slot_seeds(1, slots).tolist(), strict=True):
        env.reset(seed=seed)

    def step(env: Any, action: Any) -> bool:
        _, _, terminated, truncated, _ = env.step(action)
        return bool(terminated or truncated)

    return one_by_one(envs, step, lambda env: env.reset())


def bare_minatar(config: EnvConfig, slots: int) -> Bare:
    import minatar

    envs = [minatar.Environment(config.id.partition(":")[2], config.sticky_actions) for _ in range(slots)]
    chosen = envs[0].minimal_action_set()
    for env, seed in zip(envs, slot_seeds(1, slots).tolist(), strict=True):
        env.seed(seed)
        env.reset()

    def step(env: Any, action: Any) -> bool:
        _, over = env.act(chosen[action])
        env.state()
        return bool(over)

    def reset(env: Any) -> None:
        env.reset()
        env.state()

    return one_by_one(envs, step, reset)


def bare_control(config: EnvConfig, slots: int) -> Bare:
    from dm_control import suite

    domain, task = config.id.partition(":")[2].split("-", 1)
    flat = {"flat_observation": True}
    envs = [
        suite.load(domain, task, {"random": seed}, environment_kwargs=flat)
        for seed in slot_seeds(1, slots).tolist()
    ]
    for env in envs:
        env.reset()
    return one_by_one(envs, lambda env, action: bool(env.step(action).last()), lambda env: env.reset())


def bare_atari(config: EnvConfig, slots: int) -> Bare:
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv(
        game=config.id.partition(":")[2],
        num_envs=slots,
        num_threads=1,
        frameskip=config.frame_skip,
        repeat_action_probability=config.sticky_actions,
        full_action_space=config.full_action_space,
        noop_max=config.noop_max + 1,
        autoreset_mode="SameStep",
    )
    env.reset(seed=slot_seeds(1, slots))
    return env.step


def bare_football(config: EnvConfig, slots: int) -> Bare:
    from gfootball import env as football

    name = config.id.partition(":")[2]
    envs = [
        football.create_environment(env_name=name, representation="extracted", stacked=True)
        for _ in range(slots)
    ]
    for env in envs:
        env.reset()
    return one_by_one(envs, lambda env, action: bool(env.step(action)[2]), lambda env: env.reset())


BARE = {
    "atari": bare_atari,
    "football": bare_football,
    "gym": bare_gymnasium,
    "mujoco": bare_gymnasium,
    "minatar": bare_minatar,
    "dm_control": bare_control,
}


def rate(step: Callable[[Any], object], actions: list[Any], slots: int, seconds: float) -> float:
    """Steps of all slots per second of this process's time, over this many seconds of it."""
    began_s, count = time.process_time(), 0
    while (passed_s := time.process_time() - began_s) < seconds:
        step(actions[count % ACTIONS])
        count += 1
    return count * slots / passed_s


def rates(config: EnvConfig, slots: int, seconds: float) -> tuple[float, float, float]:
    """Steps per second bare and as Troupe steps it, and the median share of the two of each turn."""
    vector = make_vector(config, slots, 1)
    vector.reset()
    spec, rng = vector.spec, np.random.default_rng(0)
    rows = [spec.actions.random(rng, slots) for _ in range(ACTIONS)]
    natives = [_natives(spec, row) for row in rows]
    bare = BARE[config.id.partition(":")[0]](config, slots)
    found: list[tuple[float, float]] = []
    for _ in range(TURNS):
        share = seconds / TURNS
        found.append((rate(bare, natives, slots, share), rate(vector.step, rows, slots, share)))
    vector.close()
    bare_rate, own_rate = (statistics.median(side) for side in zip(*found, strict=True))
    return bare_rate, own_rate, statistics.median(own / other for other, own in found)


def _natives(spec: EnvSpec, row: np.ndarray) -> Any:
    """What the bare library takes: Atari's vectoriser an array, the others an action each."""
    return row if spec.id.startswith("atari:") else list(spec.actions.natives(row))


def random_scores(config: EnvConfig, slots: int, games: int) -> list[float]:
    """Returns of random play, of this many whole games of every slot."""
    vector: VectorEnv = make_vector(config, slots, 7, evaluation=True)
    rng, returns = np.random.default_rng(7), [list[float]() for _ in range(slots)]
    vector.reset()
    while any(len(of_slot) < games for of_slot in returns):
        for episode in vector.step(vector.spec.actions.random(rng, slots)).episodes:
            returns[episode.slot].append(episode.return_raw)
    vector.close()
    return [score for of_slot in returns for score in of_slot[:games]]


def told_of(env_id: str, scores: list[float]) -> dict[str, float | int]:
    """What is reported of them: mean, its standard error, how many; and the published mean of random play."""
    told: dict[str, float | int] = {
        "random_return": round(statistics.fmean(scores), 2),
        "random_error": round(statistics.stdev(scores) / len(scores) ** 0.5, 2) if len(scores) > 1 else 0.0,
        "random_games": len(scores),
    }
    published = random_and_human(env_id)
    return told if published is None else told | {"published_random": published[0]}


def main() -> None:
    arguments = parser(__doc__, seconds=5.0)
    arguments.add_argument("--ids", default=",".join(IDS), help="environments, separated by commas")
    arguments.add_argument("--slots", type=int, default=8, help="copies of each")
    arguments.add_argument(
        "--games", type=int, default=2, help="games of random play for every slot; 0: none"
    )
    arguments.add_argument("--all-actions", action="store_true", help="Atari's 18 actions in every game")
    arguments.add_argument(
        "--frame-skip", type=integer(1), default=4, help="Atari frames for which an action is repeated"
    )
    options = arguments.parse_args()
    figures: dict[str, float | int | str] = {
        "slots": options.slots,
        "frame_skip": options.frame_skip,
        "all_actions": options.all_actions,
    }
    for env_id in options.ids.split(","):
        sticky = 0.1 if env_id.startswith("minatar:") else 0.0
        atari = env_id.startswith("atari:")
        config = EnvConfig(
            id=env_id,
            reward_clip="none",
            sticky_actions=sticky,
            full_action_space=atari and options.all_actions,
            frame_skip=options.frame_skip if atari else 4,
        )
        try:
            make_spec(config)
        except MissingEngineError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        told: dict[str, float | int] = {}
        if options.seconds:
            bare, own, share = rates(config, options.slots, options.seconds)
            told = {"bare_steps_per_s": round(bare), "steps_per_s": round(own), "share": round(share, 3)}
        if options.games:
            told |= told_of(env_id, random_scores(config, options.slots, options.games))
        if not options.json:
            print(env_id, told, flush=True)
        figures |= {f"{env_id} {name}": value for name, value in told.items()}
    report("envs", figures)


if __name__ == "__main__":
    main()
