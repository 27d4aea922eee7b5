"""The evaluator: plays full games with fresh parameters, and reports how good they are."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from common.agents import Agent, make_agent
from common.config import Config
from common.envs import make_spec
from common.errors import PeerError
from common.installation import install_command
from common.runtime import StopSignal, health
from common.runtime.video import Recorder, encode_gif, encode_mp4
from common.wire.control.client import ControlClient
from common.wire.security.claims import MAX_EPISODES, MAX_VIDEO_BYTES
from services.evaluator.games import Result, play

_log = logging.getLogger(__name__)

VIDEO_PERIOD_S = 300.0  # films are the largest thing in a run's TensorBoard directory
MAX_GIF_BYTES = 4 << 20  # TensorBoard loads all of them at once
FINAL_PARAMS_S = 20.0
_SEED_TAG = 0x5EED  # no training environment has a seed derived in this way
_POLL_S = 0.25


class Evaluator:
    """One evaluator. `run` returns when the run is complete or a stop was asked for."""

    def __init__(self, config: Config, client: ControlClient, stop: StopSignal) -> None:
        """Build the agent for the run that `client` has joined."""
        torch.set_num_threads(1)
        self._config = config
        self._client = client
        self._stop = stop
        self._agent: Agent = make_agent(
            config.agent, make_spec(config.env), seed=config.run.seed, device="cpu"
        )
        self._version = -1
        self._next_video_s = 0.0

    def run(self) -> None:
        """Evaluate the newest version, at most every `period_s`, and the last one of the run once more."""
        next_start_s = 0.0
        while not self._stop and not self._client.state.stopping:
            self._client.check()
            health.report()
            wait_s = next_start_s - time.monotonic()
            if wait_s > 0:
                self._stop.wait(min(wait_s, _POLL_S))
                continue
            params = self._client.params_if_newer(self._version)
            if params is None:
                self._stop.wait(_POLL_S)
                continue
            self._load(params.version, params.params)
            next_start_s = time.monotonic() + self._config.evaluator.period_s
            self._evaluate()
        if not self._stop:
            self._evaluate_last()

    def _evaluate_last(self) -> None:
        """The run is complete: the learner waits for the score of its last version."""
        try:
            params = self._client.wait_params(FINAL_PARAMS_S)
        except PeerError as error:
            _log.warning("the last parameters were not evaluated: %s", error)
            return
        self._load(params.version, params.params)
        _log.info("last evaluation")
        self._evaluate(last=True)

    def _load(self, version: int, params: dict[str, np.ndarray]) -> None:
        self._agent.load_params(params)
        self._version = version

    def _evaluate(self, *, last: bool = False) -> None:
        """Play, and report; a run that ends meanwhile cuts it short, for a newer version waits."""
        section = self._config.evaluator
        started = time.monotonic()
        recorder = None
        if section.video and (last or started >= self._next_video_s):
            recorder = Recorder(max_steps=section.video_max_steps)

        def should_stop() -> bool:
            health.report()
            state = self._client.state
            return self._stop.requested or (not last and state.stopping and state.version > self._version)

        result = play(
            self._agent,
            self._config.env,
            episodes=section.episodes,
            slots=section.slots,
            seed=evaluation_seed(self._config.run.seed, self._version),
            epsilon=self._agent.eval_epsilon,
            max_episode_frames=section.max_episode_frames,
            recorder=recorder,
            should_stop=should_stop,
        )
        if result is None:
            return
        if recorder is not None:
            self._next_video_s = time.monotonic() + VIDEO_PERIOD_S
            self._send_video(recorder)
        metrics = self._metrics(result, time.monotonic() - started)
        games = [list(game) for game in zip(result.returns, result.steps, strict=True)]
        self._client.send_telemetry(metrics, fields={"episodes": games[:MAX_EPISODES]})
        health.report(metrics)
        _log.info(
            "version %d: mean return %.2f over %d games of %.0f steps, %.1f s",
            self._version,
            result.mean_return,
            len(result.returns),
            result.mean_steps,
            time.monotonic() - started,
        )

    def _metrics(self, result: Result, seconds: float) -> dict[str, float]:
        metrics = {
            "eval/episode_return": result.mean_return,
            "eval/episode_return_std": result.std_return,
            "eval/episode_return_min": min(result.returns),
            "eval/episode_return_max": max(result.returns),
            "eval/episode_length": result.mean_steps,
            "eval/episodes": float(len(result.returns)),
            "eval/version": float(self._version),
            "eval/duration_s": seconds,
        }
        normalised = result.human_normalized(self._config.env.id)
        metrics |= {f"eval/{name}": value for name, value in normalised.items()}
        return metrics | {f"eval/return/{task}": mean for task, mean in result.by_task().items()}

    def _send_video(self, recorder: Recorder) -> None:
        """Send the film ahead of the scores: the learner may end the run as soon as it has those."""
        if not recorder:
            if recorder.missing:
                _log.warning("no film: %s", recorder.missing)
            return
        try:
            film: dict[str, np.ndarray | bytes] = {
                "video": encode_gif(recorder, recorder.frames_per_s, MAX_GIF_BYTES),
                "mp4": encode_mp4(recorder, recorder.frames_per_s),
            }
        except ImportError as error:
            _log.warning("no film: it needs %s (%s)", error.name, install_command("evaluator"))
            return
        if len(film["mp4"]) > MAX_VIDEO_BYTES - MAX_GIF_BYTES:
            film.pop("mp4")
        self._client.send_telemetry({}, film)


def evaluation_seed(run_seed: int, version: int) -> int:
    """New games for every version, apart from those of training, and the same again in a repeated run."""
    return int(np.random.SeedSequence([run_seed, _SEED_TAG, max(0, version)]).generate_state(1)[0])
