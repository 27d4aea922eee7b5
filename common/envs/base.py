"""What every environment family offers to the rest of Troupe: one batched, auto-resetting `VectorEnv`.

The step protocol is "same-step autoreset": where an episode ends, `Step.obs` is already the first observation
of the next one, and the true last observation is handed over beside it, in `Step.final_obs`. An accumulator
needs both: one to act on, the other to bootstrap from when the episode was truncated rather than terminated.
"""

from __future__ import annotations

import abc
import difflib
import logging
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from troupe.common.envs.calls import Calls
from troupe.common.envs.returned import BadReturn
from troupe.common.errors import ConfigError, TroupeError, raised_line
from troupe.common.spaces import ActionSpec, Leaf

if TYPE_CHECKING:
    from collections.abc import Callable

    from troupe.common.config.env_section import EnvConfig

_log = logging.getLogger(__name__)

Seed = int | Sequence[int]
"""Of all slots together, or of each, where the slots of one run are spread over several vectors."""
KEPT_FAILURES = 100
MAX_FAILURES_IN_A_ROW = 8
"""More of them end the process."""
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0


class EnvError(TroupeError):
    """An environment that keeps failing although it was rebuilt several times."""


@dataclass(frozen=True)
class EnvSpec:
    """What a network and an accumulator have to know about an environment.

    Attributes:
        id: the configured id, with its family prefix, for example `atari:pong`.
        obs_shape: shape of one whole observation; stacked pixels are `(stack, height, width)`.
        obs_dtype: numpy dtype name of the observation, `uint8` for pixels and `float32` otherwise.
        actions: what an action is.
        stack: number of frames in an observation, 0 where frames are not stacked.
        frames_per_step: emulator frames that one agent step takes.
        pixels: whether observations are images.
        obs_leaves: the parts of an observation that is more than one array of numbers: it is uint8 `[bytes]`,
            see `troupe.common.spaces.packed`. Empty for others.
        instruction_words: words of an instruction in the last row of pixels
        (`troupe.common.data.instructions`).
        packed_bits: pixels are 0 or 255, and a byte of an observation is eight of a row, as `numpy.packbits`
            packs them: so they are sent and stored, and only networks unpack them.
        tasks: names of the levels that the id stands for, see `Episode.task`; empty where it is but one.
        agents: how many act in one copy, each in a slot of its own; the slots of a copy are neighbours.
        sides: of several agents, the number of the side that each is on, see `troupe.common.envs.sides`.
    """

    id: str
    obs_shape: tuple[int, ...]
    obs_dtype: str
    actions: ActionSpec
    stack: int
    frames_per_step: int
    pixels: bool
    instruction_words: int = 0
    obs_leaves: tuple[Leaf, ...] = ()
    packed_bits: bool = False
    tasks: tuple[str, ...] = ()
    agents: int = 1
    sides: tuple[int, ...] = ()

    @property
    def seen_shape(self) -> tuple[int, ...]:
        """Of an observation as a network sees it: `obs_shape`, unless its bits have to be unpacked."""
        return (*self.obs_shape[:-1], 8 * self.obs_shape[-1]) if self.packed_bits else self.obs_shape


@dataclass(frozen=True)
class Failure:
    """One failure of an environment; its text says which environment, why, and where.

    Attributes:
        env_id: the configured id.
        cause: goes on a sentence that begins with the id, such as `raised ValueError: no`.
        slot: the copy that failed; None where all copies are one object.
        step: of the episode, counted from 1; 0 is `reset`.
        seed: that the copy had last; None where it is not known.
    """

    env_id: str
    cause: str
    slot: int | None
    step: int
    seed: int | None = None

    def __str__(self) -> str:
        where = f"at step {self.step}" if self.step else "in reset()"
        slot = "all slots" if self.slot is None else f"slot {self.slot}"
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.env_id} {self.cause} {where}, {slot}{seed}"


MAX_TOLD = 16
"""Numbers that an environment may say of an episode."""
_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
_TOLD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,48}")


class Episode(NamedTuple):
    """One finished game: its unclipped return, its length, and how many emulator frames it took.

    `task` says which of several it was, where an environment is made of several; `score` what it came to,
    where rewards are made of more than that; `told` what the environment says of it, see `told_in`.
    """

    slot: int
    return_raw: float
    steps: int
    frames: int
    task: str = ""
    score: float | None = None
    told: Mapping[str, float] = {}


def told_in(info: Any) -> dict[str, float]:
    """The numbers in the `info` of an episode's last step, such as `is_success`: `MAX_TOLD` at most.

    Names are of letters, digits, `_`, `-` and `.`; what is no finite number, or a table, is left out.
    """
    if not isinstance(info, Mapping):
        return {}
    told: dict[str, float] = {}
    for name, value in info.items():
        if not (isinstance(name, str) and _TOLD_NAME.fullmatch(name)):
            continue
        # The bounds of the wire, which would refuse the whole report for one number; NaN is in no range.
        if isinstance(value, _NUMBERS) and -1e30 <= value <= 1e30:
            told[name] = float(value)
    return dict(sorted(told.items())[:MAX_TOLD])


def means_told(episodes: Sequence[Episode]) -> dict[str, float]:
    """The mean of each number over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.told.items():
            values.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}


@dataclass
class Step:
    """The result of one step of all `S` slots.

    Attributes:
        obs: `[S, *obs_shape]`; where an episode ended, the first observation of the next one.
        reward: float32 `[S]`, clipped as configured.
        terminated: bool `[S]`, in the sense of learning: with `episodic_life` a lost life terminates.
        truncated: bool `[S]`, ended by a time limit: the value of the final observation is bootstrapped.
        final_obs: the true last observation of the slots that are terminated or truncated.
        episodes: the games that finished in this step (never single lives).
        discarded: slots whose environment failed and was rebuilt: whatever was collected since the last
            `obs` is void and nothing may link the old episode to the new one.
        idle: slots whose agent took no part in the step, because it has not come yet or has left before the
            others: the action did nothing, and nothing may be made of the step. One that took no part in the
            step before this one begins an episode at the `obs` of that.
    """

    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: dict[int, np.ndarray] = field(default_factory=dict)
    episodes: list[Episode] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)


class VectorEnv(abc.ABC):
    """A fixed number of copies of one environment that step together."""

    spec: EnvSpec
    num_slots: int
    restarts_total: int = 0
    """How many times an environment failed and was rebuilt."""
    failures: deque[Failure]
    """The newest failures, in their order."""
    calls: Calls
    """Which call of its environment each slot is in."""
    steps_per_s: float = 15.0
    """Agent steps a second at the pace that the environment was made for."""

    @abc.abstractmethod
    def reset(self, seed: Seed | None = None) -> np.ndarray:
        """Start a new game in every slot; the first observations, `[S, *obs_shape]`.

        Without a `seed`, the first reset takes the one given at construction and later ones go on from there.
        """

    def assign(self, slots: Sequence[int], total_slots: int) -> None:  # noqa: B027
        """The copies have these numbers among all slots of the run; to be said before a reset.

        It makes a difference where copies are unlike, as the levels of DMLab-30 are.
        """

    @abc.abstractmethod
    def step(self, actions: np.ndarray) -> Step:
        """Apply `actions` `[S, *spec.actions.shape]`, one per slot."""

    @abc.abstractmethod
    def render_frame(self, slot: int) -> np.ndarray:
        """What a spectator sees of `slot`, uint8 `[H, W, 3]`; NoPictureError where there is nothing."""

    def _count_failure(self, failure: Failure, rebuilder: Rebuilder) -> None:
        """Count a failure, and wait before the caller rebuilds; EnvError where failures do not stop."""
        self.restarts_total += 1
        self.failures.append(failure)
        rebuilder.failed(failure)

    def close(self) -> None:
        """Free what the environment holds."""
        self.calls.close()


class GameTracker:
    """Unclipped return and length of the game that each slot is in."""

    def __init__(self, num_slots: int) -> None:
        self.returns = [0.0] * num_slots
        self._rounds = 0
        self._before = [0] * num_slots  # rounds before the game began

    def length(self, slot: int) -> int:
        """Steps of the game of `slot`."""
        return self._rounds - self._before[slot]

    def longest(self) -> int:
        """Steps of the longest game."""
        return self._rounds - min(self._before)

    def add(self, rewards: np.ndarray) -> None:
        """Count one step of every slot with its raw rewards `[S]`."""
        self.returns = [total + reward for total, reward in zip(self.returns, rewards.tolist(), strict=True)]
        self._rounds += 1

    def finish(
        self,
        slot: int,
        frames: int,
        task: str = "",
        score: float | None = None,
        told: Mapping[str, float] | None = None,
    ) -> Episode:
        """The game of `slot` as it ended; the slot starts from zero."""
        episode = Episode(slot, self.returns[slot], self.length(slot), frames, task, score, told or {})
        self.clear(slot)
        return episode

    def clear(self, slot: int) -> None:
        """Forget the game of `slot`."""
        self.returns[slot] = 0.0
        self._before[slot] = self._rounds


class Rebuilder:
    """Waits before an environment is rebuilt, longer each time, and gives up when failures do not stop.

    A pause begins with the failure before: of many copies that fail together, all wait while one does.
    """

    def __init__(
        self, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.failures_in_a_row = 0
        self._sleep, self._clock = sleep, clock
        self._failed_s = 0.0

    def succeeded(self) -> None:
        """A step went well: the next failure starts a new row."""
        self.failures_in_a_row = 0

    def failed(self, failure: Failure) -> None:
        """Count a failure and wait before the caller rebuilds; the first retry is immediate."""
        self.failures_in_a_row += 1
        if self.failures_in_a_row > MAX_FAILURES_IN_A_ROW:
            raise EnvError(
                f"{failure.env_id} failed {self.failures_in_a_row} times in a row, the last time: {failure}"
            )
        pause_s = 0.0
        if self.failures_in_a_row > 1:
            # Longer each time: what keeps failing may need a moment, as a display that starts or a disk that
            # fills does.
            pause_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (self.failures_in_a_row - 2))
            pause_s = max(0.0, self._failed_s + pause_s - self._clock())
        _log.warning("%s; its episode is discarded, rebuilding in %.1f s", failure, pause_s)
        if pause_s:
            self._sleep(pause_s)
        self._failed_s = self._clock()


def cause_of(error: BaseException) -> str:
    """The cause of a Failure: what was returned, or what was raised and in which line, in one line."""
    if isinstance(error, BadReturn):
        return str(error)
    return f"raised {raised_line(error)}"


def clip_rewards(rewards: np.ndarray, mode: str) -> np.ndarray:
    """Raw rewards `[S]` as float32, after `mode`: `none`, or `sign` for -1, 0 and 1."""
    if mode == "sign":
        return np.sign(rewards).astype(np.float32)
    return rewards.astype(np.float32)


def slot_seeds(seed: Seed, num_slots: int) -> np.ndarray:
    """Independent seeds, one per slot, that fit a C int: int64 `[S]`.

    Consecutive integers would make slot 1 of one actor the twin of slot 0 of the next.
    """
    if isinstance(seed, Sequence):
        return np.asarray(seed, np.int64)
    state = np.random.SeedSequence(seed).generate_state(num_slots, np.uint32)
    return (state >> np.uint32(1)).astype(np.int64)


def check_copies(spec: EnvSpec, slots: int) -> None:
    """Raise ConfigError where so many slots do not divide among whole copies."""
    if slots % spec.agents:
        raise ConfigError(
            f"{spec.id} has {spec.agents} agents, each in its own slot: {slots} slots do not make whole "
            f"copies; set actor.slots to a multiple of {spec.agents}"
        )


def split_slots(slots: int, parts: int, per_copy: int = 1) -> list[np.ndarray]:
    """The numbers from 0 to `slots - 1` in `parts` parts at most, as even as whole copies allow.

    Args:
        slots: a multiple of `per_copy`; what is left over goes into the last part.
        parts: wanted.
        per_copy: slots of one copy, `EnvSpec.agents`.
    """
    copies = np.arange(max(1, slots // per_copy))
    starts = [part[0] * per_copy for part in np.array_split(copies, min(parts, len(copies)))]
    return np.split(np.arange(slots), starts[1:])


def options(config: EnvConfig, known: dict[str, Any]) -> dict[str, Any]:
    """`env.kwargs` over the defaults in `known`; ConfigError for an unknown name or another type."""
    for name, value in config.kwargs.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{config.id} has no option {name!r} in env.kwargs; nearest: {near}")
        # Exactly the type: True is an int, and would be taken for a width of 1.
        if type(value) is not type(known[name]):
            kind = type(known[name]).__name__
            raise ConfigError(f"env.kwargs {name} of {config.id} should be a {kind}, not {value!r}")
    return {**known, **config.kwargs}
