"""Plays whole games: the one way in which scores are made, for the evaluator and for `troupe eval`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from troupe.common.agents import Agent, Inputs
from troupe.common.config import EnvConfig
from troupe.common.envs import Episode, VectorEnv, copy_slots, make_vector, means_told
from troupe.common.envs.base import EnvError, clip_rewards
from troupe.common.envs.spectator import NoPictureError
from troupe.common.stats.played import Result
from troupe.services.evaluator.tape import Tape
from troupe.services.evaluator.video import Recorder
from troupe.services.evaluator.window import Window

EACH_FAILED, ALL_FAILED = 3, 8
"""Episodes in a row that failed, of each slot and of all together, before games are given up of which none
has ended."""
ONE_FAILED = 20
"""The same of any slot, whatever the others do."""


def play(
    agent: Agent,
    env: EnvConfig,
    *,
    episodes: int,
    slots: int,
    seed: int,
    epsilon: float,
    max_episode_frames: int,
    threads: int = 1,
    recorder: Recorder | None = None,
    window: Window | None = None,
    tape: Tape | None = None,
    on_game: Callable[[Episode], None] = lambda game: None,
    should_stop: Callable[[], bool] = lambda: False,
    steady: bool = False,
    first_game: int = 0,
    all_games: int = 0,
) -> Result | None:
    """Play `episodes` full games without reward clipping.

    Every slot plays a number of games that is fixed beforehand. Taking the first games that finish, whichever
    slot they come from, would prefer short games and so misjudge the mean.

    Args:
        agent: only acts; nothing of it changes.
        env: the run's environment; lives, clipping and the longest game are not those of training.
        episodes: games in all.
        slots: games played side by side; of several agents, each counts, and the last copy is made whole.
        seed: of the games and of the exploration; the same seed gives the same games.
        epsilon: chance of exploring, see `Agent.act`.
        max_episode_frames: emulator frames after which a game is cut, in place of the training's limit.
        threads: threads that step the games.
        recorder: films the first game of slot 0.
        tape: keeps every game that counts, step by step.
        window: shows every game of slot 0 that counts, at its own speed.
        on_game: called with every game that counts.
        should_stop: looked at before every step.
        steady: slots that have played their share go on as long as others do. Every forward pass is then of
            all slots, and what happens in one does not depend on `episodes`: the first games are the same.
        first_game: number of the first one in an evaluation of which these are a part; each slot plays one.
        all_games: of that evaluation; 0: these are all. They play the levels of an environment in turn.

    Returns:
        The games, or None if stopped early.

    Raises:
        EnvError: episodes only fail, so that the games would never end; names the last failure.
    """
    per_copy = copy_slots(env)
    # Where several agents play one game, all of them go on until it is over, and a copy is whole.
    steady = steady or per_copy > 1
    slots = -(-(slots if steady else min(slots, episodes)) // per_copy) * per_copy
    # Apart, so that another epsilon does not change the games.
    game_seed, action_seed = np.random.SeedSequence(seed).generate_state(2)
    rng = np.random.default_rng(action_seed)
    env = env.model_copy(update={"max_episode_frames": max_episode_frames})
    # Seeds of emulators are 31 bits.
    vector = make_vector(env, slots, int(game_seed) >> 1, threads, evaluation=True)
    vector.assign(range(first_game, first_game + slots), all_games or slots)
    quotas = [episodes // slots + (slot < episodes % slots) for slot in range(slots)]
    games: list[list[Episode]] = [[] for _ in range(slots)]
    watching: list[Recorder | Window] = [each for each in (recorder, window) if each is not None]
    for each in watching:
        each.begin(vector.steps_per_s)
    try:
        first = vector.reset()
        if tape is not None:
            tape.begin(first)
        inputs = Inputs.start(first, agent.memory_size, vector.spec.actions)  # of the busy slots only
        acting = list(range(slots))
        failures = _Failures(vector)
        actions = vector.spec.actions.zeros(slots)
        while busy := [slot for slot in range(slots) if len(games[slot]) < quotas[slot]]:
            if should_stop():
                return None
            if games[0]:
                watching = [each for each in watching if each is not recorder]
            if 0 in busy:
                _show(vector, watching)
            # Slots whose games are over are stepped with zeros, but no longer cost a forward pass.
            actions[:] = 0
            if len(busy) < len(acting) and not steady:
                inputs = inputs.rows([acting.index(slot) for slot in busy])
                acting = busy
            act = agent.act(inputs, np.full(len(acting), epsilon, np.float32), rng)
            actions[acting] = act.action
            step = vector.step(actions)
            if tape is not None:
                tape.add(actions, step, busy)
            ended = step.terminated | step.truncated
            ended[step.discarded + step.idle] = True
            # Games are not clipped, but the network has always seen rewards as training counts them.
            seen = clip_rewards(step.reward[acting], env.reward_clip)
            inputs = inputs.after(act, step.obs[acting], seen, ended[acting])
            for game in step.episodes:
                failures.in_a_row[game.slot] = 0
                if len(games[game.slot]) < quotas[game.slot]:
                    games[game.slot].append(game)
                    on_game(game)
            if step.discarded:
                failures.add(step.discarded, busy, vector, has_games=any(games))
    finally:
        vector.close()
    result = _result(games, levels=len(vector.spec.tasks))
    return replace(result, failures=failures.count, first_failure=failures.first)


class _Failures:
    """Episodes that failed: `count` of the games that count, the `first` of them, and `in_a_row` `[S]`."""

    def __init__(self, vector: VectorEnv) -> None:
        self.count, self.first = 0, ""
        self.in_a_row = np.zeros(vector.num_slots, np.int64)
        self._before = vector.restarts_total

    def add(self, slots: list[int], busy: list[int], vector: VectorEnv, *, has_games: bool) -> None:
        """Take in those of `slots`. Raises EnvError where the games of the `busy` ones will never end."""
        self.in_a_row[slots] += 1
        counted = set(slots).intersection(busy)
        self.count += len(counted)
        if counted and not self.first:
            self.first = str(list(vector.failures)[self._before - vector.restarts_total :][0])
        self._before = vector.restarts_total
        failed = self.in_a_row[busy]
        none_ends = not has_games and failed.min() >= EACH_FAILED and failed.sum() >= ALL_FAILED
        if none_ends or failed.max() >= ONE_FAILED:
            where = " in one of its copies" if has_games else ""
            raise EnvError(
                f"no episode of {vector.spec.id} can be finished{where}: {vector.restarts_total} failures, "
                f"the last: {vector.failures[-1]}"
            )


def _show(vector: VectorEnv, watching: list[Recorder | Window]) -> None:
    """Give slot 0's picture to all that want it now; where there is none, `watching` becomes empty."""
    wanting = [each for each in watching if each.due()]
    if not wanting:
        return
    try:
        frame = vector.render_frame(0)
    except NoPictureError as error:
        for each in watching:
            each.missing = str(error)
        watching.clear()
        return
    for each in wanting:
        each.add(frame)


def _result(games: Sequence[Sequence[Episode]], levels: int) -> Result:
    # First games of all slots, then second ones: a shorter evaluation is then a prefix of a longer one.
    flat = [game for of_number in itertools.zip_longest(*games) for game in of_number if game is not None]
    tasks = [game.task for game in flat]
    named = tasks if any(tasks) else []
    told = means_told(flat)
    return Result([game.return_raw for game in flat], [game.steps for game in flat], named, told, levels)
