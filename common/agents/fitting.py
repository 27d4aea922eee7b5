"""Refusals that all agents share: what does not fit a network, in one line that says what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn

from common.agents.tensors import tensors
from common.errors import CheckpointError, ConfigError


def load_parameters(network: nn.Module, params: dict[str, np.ndarray]) -> None:
    """Copies `params` into the network; raises ConfigError where they are of another."""
    try:
        network.load_state_dict(tensors(params))
    except RuntimeError as error:
        raise ConfigError(
            f"parameters do not fit the network: {_first_line(error)}; use the run's own config"
        ) from None


@contextlib.contextmanager
def suiting(torso: str, environment: str) -> Iterator[None]:
    """Around the making of a network; raises ConfigError where the observations are not for its torso."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            f"agent.torso {torso!r} does not suit {environment}: {error}; try --agent.torso mlp"
        ) from None


@contextlib.contextmanager
def checkpoint_of(algorithm: str, meta: Mapping[str, Any]) -> Iterator[None]:
    """Around the loading of a checkpoint; raises CheckpointError where it is of another agent or network."""
    if meta.get("algorithm") != algorithm:
        raise CheckpointError(f"the checkpoint is of algorithm {meta.get('algorithm')!r}, not {algorithm!r}")
    try:
        yield
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"the checkpoint does not fit this network: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """What went wrong, in one line."""
    return " ".join(str(error).split())[:200]
