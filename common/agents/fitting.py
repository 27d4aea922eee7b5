"""What fits a network and what does not: all agents refuse it alike, in one line that says what to do."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from common.agents.tensors import tensors
from common.errors import CheckpointError, ConfigError
from common.nets.pixels import NormalizedPixels

if TYPE_CHECKING:
    from common.envs import EnvSpec

Network = TypeVar("Network", bound=nn.Module)


class PixelConfig(Protocol):
    """Fields of `common.config.fields.PixelAgentConfig`."""

    normalize_pixels: bool
    normalize_pixels_frames: int


class BodyConfig(PixelConfig, Protocol):
    """Fields of an agent whose network is a `common.nets.recurrent.SequenceBody`; see there."""

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


def suited(torso: str, pixel_torso: str, spec: EnvSpec, make: Callable[[str], Network]) -> Network:
    """A network with `torso`, or for `auto` with `pixel_torso` or `mlp`, whichever the observations are for.

    Raises ConfigError where the observations are not for the torso.
    """
    if torso == "auto":
        torso = pixel_torso if spec.pixels else "mlp"
    if torso == "mlp" and spec.pixels:
        raise ConfigError(
            f"agent.torso 'mlp' does not suit {spec.id}: it would take its pictures as "
            f"{math.prod(spec.obs_shape):,} unrelated numbers; try --agent.torso {pixel_torso}, or a preset "
            "for pictures, such as pong-apex"
        )
    try:
        return make(torso)
    except ValueError as error:
        raise ConfigError(
            f"agent.torso {torso!r} does not suit {spec.id}: {error}; try --agent.torso mlp"
        ) from None


def normalized_pixels(config: PixelConfig, spec: EnvSpec) -> NormalizedPixels | None:
    """What the network sees of pixels; None: these divided by 255, or there are none."""
    if not (config.normalize_pixels and spec.pixels):
        return None
    *channels, height, width = spec.obs_shape[1:] if spec.stack else spec.obs_shape
    height -= bool(spec.instruction_words)  # the last row of pixels is words
    return NormalizedPixels((*channels, height, width), spec.stack, config.normalize_pixels_frames)


def body_options(config: BodyConfig, spec: EnvSpec) -> dict[str, Any]:
    """Arguments of a `SequenceBody` besides its shapes and torso."""
    return {
        "hidden_units": config.hidden_units,
        "mlp_units": config.mlp_units,
        "lstm_units": config.lstm_units,
        "lstm_layers": config.lstm_layers,
        "see_last_step": config.see_last_step,
        "instruction_words": spec.instruction_words,
        "inputs": normalized_pixels(config, spec),
    }


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
        raise CheckpointError(f"the checkpoint does not fit this network: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """What went wrong, in one line."""
    return " ".join(str(error).split())[:200]


def check_device(device: str) -> None:
    """Refuse a device of torch, `cpu`, `cuda` or `cuda:N`, that this machine does not have."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"learner.device is {device!r} but torch finds no CUDA; use cpu")
    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"learner.device is {device!r} but there are {torch.cuda.device_count()} GPUs, counted from 0"
        )
