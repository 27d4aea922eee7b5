"""What fits a network and what does not: all agents refuse it alike, in one line that says what to do."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from troupe.common.agents.tensors import tensors
from troupe.common.errors import CheckpointError, ConfigError, MisfitError
from troupe.common.nets.parts import PartInputs, image_shape
from troupe.common.nets.pixels import NormalizedPixels, PackedPixels, ScaledPixels
from troupe.common.nets.torsos import LEAST_SIDE
from troupe.common.rl.distributions import DeviationKind, Distribution, RealKind, distribution_of
from troupe.common.rl.normalizers import Normalizer

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec

Network = TypeVar("Network", bound=nn.Module)


class PixelConfig(Protocol):
    """Fields of `troupe.common.config.fields.PixelAgentConfig`."""

    pixel_torso: ClassVar[str]
    normalize_pixels: bool
    normalize_pixels_frames: int

    @property
    def torso(self) -> str:
        """Name of a torso, or `auto`."""


class RealsConfig(Protocol):
    """Fields of `troupe.common.config.fields.PolicyConfig`."""

    deviation_floor: float
    deviation_start: float
    deviation_of_input: bool

    @property
    def action_distribution(self) -> RealKind:
        """Name of a distribution."""

    @property
    def deviation(self) -> DeviationKind:
        """What makes a deviation of a parameter."""


class BodyConfig(PixelConfig, Protocol):
    """Fields of an agent whose network is a `troupe.common.nets.recurrent.SequenceBody`; see there."""

    hidden_units: int
    mlp_units: tuple[int, ...]
    lstm_units: int
    lstm_layers: int
    see_last_step: bool


def load_parameters(network: nn.Module, params: dict[str, np.ndarray]) -> None:
    """Copies `params` into the network; raises ConfigError where they are of another."""
    try:
        network.load_state_dict(tensors(params))
    except RuntimeError as error:
        raise ConfigError(
            f"parameters do not fit the network: {_first_line(error)}; use the run's own config"
        ) from None


def suited(config: PixelConfig, spec: EnvSpec, make: Callable[[str], Network]) -> Network:
    """A network with `config.torso`, or for `auto` with the one that the observations are for.

    That is `config.pixel_torso`, for pictures under 20 x 20 `minatar`, for vectors `mlp`.

    Raises ConfigError where the observations are not for the torso.
    """
    torso, pixel_torso = config.torso, config.pixel_torso
    sides = picture_sides(spec)
    pixels = bool(sides)
    if pixels and min(sides) < LEAST_SIDE:
        pixel_torso = "minatar"
    if torso == "auto":
        torso = pixel_torso if pixels else "mlp"
    if torso == "mlp" and pixels:
        raise ConfigError(
            f"agent.torso 'mlp' does not suit {spec.id}: it would take its pictures as "
            f"{math.prod(spec.seen_shape):,} unrelated numbers; try --agent.torso {pixel_torso}, or a preset "
            "for pictures, such as pong-apex"
        )
    try:
        return make(torso)
    except ValueError as error:
        raise ConfigError(
            f"agent.torso {torso!r} does not suit {spec.id}: {error}; try --agent.torso mlp"
        ) from None


def picture_sides(spec: EnvSpec) -> list[int]:
    """Heights and widths of all pictures in an observation; none where it has none."""
    sides = [side for leaf in spec.obs_leaves if leaf.picture for side in image_shape(leaf)[1:]]
    return [*sides, *(spec.seen_shape[-2:] if spec.pixels else ())]


def policy_distribution(config: RealsConfig, spec: EnvSpec) -> Distribution:
    """The distribution over actions; ConfigError where the configured one is not for them."""
    try:
        return distribution_of(
            *(spec.actions, config.action_distribution, config.deviation),
            *(config.deviation_floor, config.deviation_start),
        )
    except ValueError as error:
        message = f"agent.action_distribution does not suit {spec.id}: {error}; take normal"
        raise ConfigError(message) from None


def network_inputs(
    config: PixelConfig, spec: EnvSpec, *, vectors: bool = False
) -> NormalizedPixels | PackedPixels | Normalizer | PartInputs | None:
    """What the network sees of observations; `vectors`: numbers are normalised; None: see `SequenceBody`."""
    limit = config.normalize_pixels_frames
    if spec.obs_leaves:
        return PartInputs(spec.obs_leaves, pixels=config.normalize_pixels, limit=limit, vectors=vectors)
    if vectors and not spec.pixels:
        return Normalizer(spec.obs_shape, clip=10.0)
    pixels: NormalizedPixels | None = None
    if config.normalize_pixels and spec.pixels:
        *channels, height, width = spec.seen_shape[1:] if spec.stack else spec.seen_shape
        height -= bool(spec.instruction_words)  # the last row of pixels is words
        pixels = NormalizedPixels((*channels, height, width), spec.stack, limit)
    return PackedPixels(pixels or ScaledPixels()) if spec.packed_bits else pixels


def body_options(config: BodyConfig, spec: EnvSpec) -> dict[str, Any]:
    """Arguments of a `SequenceBody` besides its shapes and torso."""
    return {
        "hidden_units": config.hidden_units,
        "mlp_units": config.mlp_units,
        "lstm_units": config.lstm_units,
        "lstm_layers": config.lstm_layers,
        "see_last_step": config.see_last_step,
        "instruction_words": spec.instruction_words,
        "inputs": network_inputs(config, spec),
    }


def policy_options(config: RealsConfig, policy: Distribution, spec: EnvSpec) -> dict[str, Any]:
    """Arguments of an `ActorCritic` that follow from its distribution."""
    chance = config.action_distribution != "tanh"
    free = spec.actions.reals if chance and not config.deviation_of_input else 0
    return {"policy_size": policy.size, "free": free}


@contextlib.contextmanager
def checkpoint_of(algorithm: str, meta: Mapping[str, Any]) -> Iterator[None]:
    """Around the loading of a checkpoint; raises CheckpointError where it is of another agent or network."""
    if not isinstance(meta, Mapping):
        raise CheckpointError("the checkpoint says nothing of its agent")
    if meta.get("algorithm") != algorithm:
        raise CheckpointError(f"the checkpoint is of algorithm {meta.get('algorithm')!r}, not {algorithm!r}")
    try:
        yield
    except (RuntimeError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise MisfitError(f"the checkpoint does not fit this network: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """What went wrong, in one line."""
    return " ".join(str(error).split())[:200]


def check_device(device: str, name: str = "learner.device") -> None:
    """Refuse a device of torch, `cpu`, `cuda` or `cuda:N`, that is not on this machine; `name` gave it."""
    if device == "cpu":
        return
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise ConfigError(f"{name} should be cpu, cuda or cuda:N, not {device!r}")
    if not torch.cuda.is_available():
        raise ConfigError(f"{name} is {device!r} but torch finds no CUDA; use cpu")
    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"{name} is {device!r} but there are {torch.cuda.device_count()} GPUs, counted from 0"
        )
