"""The evaluator: plays full games with fresh parameters, those that the learner gives it, and reports."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from troupe.common import system
from troupe.common.agents import Agent, make_agent
from troupe.common.config import Config
from troupe.common.envs import make_spec
from troupe.common.envs.base import EnvError
from troupe.common.installation import install_command
from troupe.common.runtime import Deadline, StopSignal, health, watchdog
from troupe.common.runtime.logging import peer_text
from troupe.common.runtime.usage import OwnUsage
from troupe.common.stats.ratings import OPPONENT_GAMES, OPPONENT_VERSION, OPPONENT_WIN_RATE
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.control.member import Games, games_of_part
from troupe.common.wire.control.messages import Game, TelemetryFields
from troupe.common.wire.security.claims import MAX_VIDEO_BYTES
from troupe.services.evaluator.games import play
from troupe.services.evaluator.matches import play_match
from troupe.services.evaluator.video import Recorder, encode_gif, encode_mp4

_log = logging.getLogger(__name__)

VIDEO_PERIOD_S = 300.0  # films are the largest thing in a run's TensorBoard directory
MAX_GIF_BYTES = 4 << 20  # TensorBoard loads all of them at once
LAST_GAMES_S = 20.0
"""How long an evaluator stays at the end of a run without anything to play."""
USAGE_PERIOD_S = 5.0
_SEED_TAG = 0x5EED  # no training environment has a seed derived in this way
MATCH_PART = 1 << 16
"""In the seed of games against an earlier version: no part of an evaluation has this number."""
_POLL_S = 0.25


class Evaluator:
    """One evaluator. `run` returns when the run is complete or a stop was asked for."""

    def __init__(self, config: Config, client: ControlClient, stop: StopSignal) -> None:
        """Build the agent for the run that `client` has joined."""
        # Evaluation takes what training leaves; a second thread would be taken from the learner.
        torch.set_num_threads(1)
        self._config = config
        self._client = client
        self._stop = stop
        self._agent: Agent = make_agent(
            config.agent, make_spec(config.env), seed=config.run.seed, device="cpu"
        )
        self._next_video_s = 0.0
        self._fails = False
        self._other: Agent | None = None
        self._usage = OwnUsage("eval")
        self._next_usage_s = 0.0
        self._loop = watchdog.Loop("the evaluator")

    def run(self) -> None:
        """Play the games that the learner gives, until the run has no more to be evaluated."""
        end: Deadline | None = None
        while not self._stop:
            self._loop.turn()
            self._client.check()
            self._alive()
            games = self._client.next_games()
            if games is not None:
                self._agent.load_params(games.params.params)
                self._evaluate(games)
                end = None
                continue
            if self._client.state.stopping:
                if self._client.games_over:
                    return
                # Another evaluator may still hold the last part: it is handed out again if that one leaves.
                end = end or Deadline(LAST_GAMES_S)
                if end.expired:
                    _log.warning(
                        "no part of the last evaluation was left to play within %.0f s", end.elapsed_s
                    )
                    return
            self._stop.wait(_POLL_S)

    def _alive(self) -> None:
        """Say that the loop goes on, and now and then what this process takes of its machine."""
        health.report()
        if system.monotonic() >= self._next_usage_s:
            self._next_usage_s = system.monotonic() + USAGE_PERIOD_S
            self._client.send_telemetry(self._usage.metrics())

    def _evaluate(self, part_of: Games) -> None:
        """Play one part of an evaluation, and report that, or that the environment only fails."""
        try:
            self._play(part_of)
            self._fails = False
        except EnvError as error:
            version, part = part_of.params.version, part_of.part
            # Said once: the next evaluation most likely brings the same.
            level = logging.DEBUG if self._fails else logging.WARNING
            self._fails = True
            _log.log(level, "version %d, part %d cannot be played: %s", version, part, error)
            fields = TelemetryFields(part=part, trouble=peer_text(str(error)))
            self._client.send_telemetry({"eval/version": version}, fields=fields)

    def _play(self, part_of: Games) -> None:
        """Play one part and report; the end of the run cuts an older version short.

        Raises:
            EnvError: no games can be played.
        """
        section, version, part = self._config.evaluator, part_of.params.version, part_of.part
        started = system.monotonic()
        recorder = None
        last = self._client.state.stopping
        # Part 0 only, which is always played: with many evaluators there would otherwise be a film from each.
        if section.video and part == 0 and (last or started >= self._next_video_s):
            recorder = Recorder(max_steps=section.video_max_steps)

        def should_stop() -> bool:
            self._loop.turn()
            self._alive()
            state = self._client.state
            return self._stop.requested or (state.stopping and state.version > version)

        result = play(
            self._agent,
            self._config.env,
            episodes=games_of_part(part, section.episodes, section.part_games),
            slots=section.part_games,
            seed=evaluation_seed(self._config.run.seed, version, part),
            epsilon=self._agent.eval_epsilon,
            max_episode_frames=section.max_episode_frames,
            recorder=recorder,
            should_stop=should_stop,
            first_game=part * section.part_games,
            all_games=section.episodes,
        )
        if result is None:
            return
        if recorder is not None:
            self._next_video_s = system.monotonic() + VIDEO_PERIOD_S
            with self._loop.long("the making of a video"):
                self._send_video(recorder)
        match = self._match(part_of, should_stop)
        if match is None:
            return
        seconds = system.monotonic() - started
        games = [Game(*game) for game in zip(result.returns, result.steps, strict=True)]
        told = {f"eval/env/{name}": value for name, value in result.told.items()}
        numbers = {"eval/version": version, "eval/duration_s": seconds, **told, **match}
        self._client.send_telemetry(numbers, fields=TelemetryFields(games, result.tasks, part))
        health.report(result.metrics(self._config.env.id, version, seconds))
        _log.info(
            "version %d, part %d: mean return %.2f over %d episodes of %.0f steps, %.1f s",
            version,
            part,
            result.mean_return,
            len(games),
            result.mean_steps,
            seconds,
        )

    def _match(self, part_of: Games, should_stop: Callable[[], bool]) -> dict[str, float] | None:
        """Play against an earlier version, if there is one to play; None if stopped early."""
        section, opponent = self._config.evaluator, part_of.opponent
        if opponent is None or not section.elo_games:
            return {}
        config, version = self._config, part_of.params.version
        if self._other is None:
            self._other = make_agent(config.agent, self._agent.spec, seed=config.run.seed, device="cpu")
        self._other.load_params(opponent.params)
        scores = play_match(
            self._agent,
            self._other,
            config.env,
            games=section.elo_games,
            slots=section.slots,
            seed=evaluation_seed(config.run.seed, version, MATCH_PART),
            epsilon=self._agent.eval_epsilon,
            max_episode_frames=section.max_episode_frames,
            should_stop=should_stop,
        )
        if not scores:
            return None if scores is None else {}
        rate = sum(scores) / len(scores)
        _log.info("version %d against %d: %.2f of %d games", version, opponent.version, rate, len(scores))
        return {OPPONENT_VERSION: opponent.version, OPPONENT_GAMES: len(scores), OPPONENT_WIN_RATE: rate}

    def _send_video(self, recorder: Recorder) -> None:
        """Send the film ahead of the scores: the learner may end the run as soon as it has those."""
        if not recorder:
            if recorder.missing:
                _log.warning("no video: %s", recorder.missing)
            return
        try:
            film: dict[str, np.ndarray | bytes] = {
                "video": encode_gif(recorder, recorder.frames_per_s, MAX_GIF_BYTES),
                "mp4": encode_mp4(recorder, recorder.frames_per_s),
            }
        except ImportError as error:
            _log.warning("no video: it needs %s (%s)", error.name, install_command("evaluator"))
            return
        # Both travel in one message. The GIF stays, which TensorBoard plays.
        if len(film["mp4"]) > MAX_VIDEO_BYTES - MAX_GIF_BYTES:
            film.pop("mp4")
        self._client.send_telemetry({}, film)


def evaluation_seed(run_seed: int, version: int, part: int = 0) -> int:
    """New games for every version and part, apart from training's, and the same again in a repeated run."""
    # SeedSequence takes no negative numbers, and before the first version there is -1.
    entropy = [run_seed, _SEED_TAG, max(0, version), part]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
