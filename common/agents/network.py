"""What agents with one network share: making it, publishing it, saving it, and the steps of its optimiser."""

from __future__ import annotations

import contextlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from troupe.common.agents.base import Accumulator, Act, Batch, Inputs, Update
from troupe.common.agents.learners.reduction import ALONE, Reduction
from troupe.common.agents.tensors import (
    Network,
    below,
    load_optimizer,
    module_arrays,
    on_device,
    optimizer_arrays,
    prefixed,
    tensors,
)
from troupe.common.config.fields import PixelAgentConfig, RecurrentAgentConfig
from troupe.common.errors import CheckpointError, ConfigError, MisfitError
from troupe.common.machine import memory_limit_bytes
from troupe.common.nets.initializers import Output, initialize
from troupe.common.nets.parts import PartInputs, image_shape
from troupe.common.nets.pixels import NormalizedPixels, PackedPixels, ScaledPixels
from troupe.common.nets.spectral import spectral_layers
from troupe.common.nets.torsos import MIN_SIDE
from troupe.common.rl.normalizers import Normalizer, RunningMoments

if TYPE_CHECKING:
    from troupe.common.data.schema import FieldSpec
    from troupe.common.envs import EnvSpec


class Step(NamedTuple):
    """What a network may look at in `S` slots: `troupe.common.agents.base.Inputs` in tensors."""

    obs: Tensor
    """`[S, *obs_shape]`."""
    last_action: Tensor
    """`[S, *actions.shape]`."""
    last_reward: Tensor
    """`[S]`."""
    first: Tensor
    """`[S]` bool."""
    memory: Tensor
    """`[S, memory_size]`."""

    def sequence(self) -> tuple[Tensor, ...]:
        """Arguments of a network of sequences, of which this is one step."""
        return (*(part[None] for part in self[:-1]), self.memory)


class Stored(Protocol):
    """What is stored of steps; one of `troupe.common.agents.stored`. See `Agent` for the attributes."""

    fields: tuple[FieldSpec, ...]
    item_steps: tuple[int, int]
    memory_size: int

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> Accumulator:
        """See `Agent`."""


class Learner:
    """The optimiser of a network, and what else only a learner holds; subclasses add to that.

    Args:
        net: the network that learns.
        optimizer: of its parameters, and possibly of others.
        max_grad_norm: the global norm of the network's gradient is clipped to this; 0: not clipped.
        apart: parameters of the network that are not clipped with it, such as a temperature.

    Attributes:
        updates: batches learned from so far.
        taken_over: how often a saved state has taken the place of the optimiser's tensors.
        reduction: over the learners that share each batch.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        apart: Iterable[Tensor] = (),
    ) -> None:
        self.net = net
        self.optimizer = optimizer
        self.updates = self.taken_over = 0
        self.reduction = ALONE
        self._max_grad_norm = max_grad_norm
        self._spectral = spectral_layers(net)
        # Once: finding them in nested modules takes longer than many a step.
        self._parameters: list[Tensor] = list(net.parameters())
        left_out = {id(each) for each in apart}  # by identity: tensors compare by elements
        self._clipped = [each for each in self._parameters if id(each) not in left_out]

    def step(self, loss: Tensor, weight: float | None = None) -> Tensor:
        """Learns from a batch by one move down the gradient of its loss; see `descend`."""
        norm = self.descend(loss, weight)
        self.updates += 1
        return norm

    def descend(self, loss: Tensor | None, weight: float | None = None) -> Tensor:
        """Moves down the gradient of `loss`; returns the norm of the network's gradient before clipping.

        The loss is a mean over this learner's share of the batch, which counts `weight` among those of
        several learners: None stands for its rows. With 0 it has no loss, and moves as the others do.
        """
        # None, not zeros: a first backward pass then writes gradients instead of adding to them, and RMSProp
        # can see which parameters were not used.
        self.optimizer.zero_grad(set_to_none=True)
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        # Before clipping: the norm is that of the whole batch's gradient. Multipliers and temperatures too.
        with self.reduction.averaging(parameters, weight):
            if loss is not None and weight != 0:
                loss.backward()
        # With infinity nothing is clipped, and the norm is still measured. Multipliers and temperatures are
        # not among these parameters: their gradients have another scale and would eat into the network's
        # share.
        norm = nn.utils.clip_grad_norm_(self._clipped, self._max_grad_norm or float("inf"))
        self.optimizer.step()
        for layer in self._spectral:
            layer.settle()
        return norm

    @property
    def branch(self) -> Hashable:
        """What of the next update is decided by a count, and not by tensors: see `GraphedUpdates`."""
        return ()

    def metrics(self) -> dict[str, float]:
        """What of the last update is known without a look at a tensor, for the log."""
        return {}

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint needs beside the optimiser's moments and the number of updates."""
        return {}

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes over what `arrays` gave, out of all arrays of a checkpoint."""


class NetworkAgent(ABC):
    """An `Agent` of three parts: a network `net`, what is `stored`, and a `learner`; see `Agent`.

    A subclass makes the parts, and says how it acts and learns. Nothing else need be known of it here.
    """

    net: nn.Module

    def __init__(
        self, config: PixelAgentConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu"
    ) -> None:
        self.config = config
        self.spec = spec
        self.eval_epsilon = config.eval_epsilon
        self.seed = seed
        self.device = torch.device(device)
        # Layers draw their first weights from the generator of the whole process, which is not ours to seed.
        # With `devices=[]` CUDA's generators are left alone: touching them would initialise CUDA in every
        # actor.
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(seed)
            # A network of terabytes is a typing error: without this the kernel's OOM killer ends the process,
            # without a word.
            _check_size(self._network)
            self.net = self._network().to(self.device)
            gains: dict[Output, float] = {"values": config.value_gain}
            if hasattr(config, "policy_gain"):
                gains["policy"] = config.policy_gain
            initialize(self.net, config.initializer, gains)
        # Read once here, since `stored` may ask the network for its sizes.
        self.fields = self.stored.fields
        self.item_steps = self.stored.item_steps
        self.memory_size = self.stored.memory_size

    @abstractmethod
    def _network(self) -> nn.Module:
        """A new network; ConfigError where the observations are not for it."""

    @property
    @abstractmethod
    def stored(self) -> Stored:
        """What is stored of steps: a `cached_property`, as it may depend on the network."""

    @property
    @abstractmethod
    def learner(self) -> Learner:
        """What is needed to learn: a `cached_property`, made on first use, which an actor never makes."""

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> Accumulator:
        """See `Agent`."""
        return self.stored.accumulator(chunk_steps, phase)

    def learn_with(self, reduction: Reduction) -> None:
        """From now on each `update` is of a share of a batch: `reduction.exchange` comes before it.

        Raises ConfigError where the algorithm cannot divide a batch.
        """
        if not reduction.alone and (reason := self.config.one_learner_because):
            raise ConfigError(f"several learners cannot share a batch: {reason}")
        learner = self.learner  # made first: its target network is a copy, and learns nothing itself
        learner.reduction = reduction
        for module in self.net.modules():
            if isinstance(module, RunningMoments):
                module.together = None if reduction.alone else reduction.moments

    # ------------------------------------------------------------------ acting

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        """1 for every slot: an agent with a policy draws every action from it."""
        return np.ones(len(indices), np.float32)

    def decide(self, step: Step) -> dict[str, Tensor]:
        """What it thinks best, as a function of tensors, for other programs: `action` first.

        `q` or `policy` are what the network says, `next_memory` is the memory after the step.
        """
        raise ConfigError(
            f"{self.config.algorithm} does not define how it chooses actions: it cannot be exported"
        )

    def step_of(self, inputs: Inputs) -> Step:
        """The inputs in tensors, where the network is."""
        arrays = inputs.obs, inputs.last_action, inputs.last_reward, inputs.first, inputs.memory
        return Step(*(self._to_device(array) for array in arrays))

    def _acted(
        self, action: np.ndarray, extras: dict[str, np.ndarray], inputs: Inputs, memory: Tensor
    ) -> Act:
        """The `Act` with the memory from before the step, which is stored, and from after it, if any."""
        if not self.memory_size:
            return Act(action, extras)
        return Act(action, extras | {"memory": inputs.memory}, memory.cpu().numpy())

    # -------------------------------------------------------------- learning

    def update(self, batch: Batch) -> Update:
        """See `Agent`. A subclass has this in three parts, the two below and `made`, or overrides it whole.

        Only in parts can it be a CUDA graph: `troupe.common.agents.learners.graphed` repeats `learn`.
        """
        return self.updated(batch, self.told(batch))

    def updated(self, batch: Batch, told: Mapping[str, Tensor | np.ndarray]) -> Update:
        """`update` where `told` has been asked already."""
        placed = {
            name: batch.placed[name] if name in batch.placed else on_device(each, self.device)
            for name, each in told.items()
        }
        found = self.learn(placed, measure=batch.measure)
        return self.made(batch, {name: tensor.cpu() for name, tensor in found.items()})

    def told(self, batch: Batch) -> dict[str, Tensor | np.ndarray]:
        """What `learn` goes by, on the CPU: fields by their names, and what is drawn or counted here."""
        raise NotImplementedError

    def learn(self, told: dict[str, Tensor], *, measure: bool) -> dict[str, Tensor]:
        """The update, from tensors on the agent's device to tensors there: nothing is read in between.

        Shapes and branches follow from those of `told` and from `learner.branch` where shapes are fixed.

        Returns:
            `priorities` float64 `[B]`, where the algorithm gives them, what else `made` wants, and scalars
            `learner/...` if `measure`.
        """
        raise NotImplementedError

    @property
    def no_graph_because(self) -> str:
        """Why `learn` cannot be a CUDA graph with this configuration; empty: it can."""
        return ""

    def made(self, batch: Batch, found: Mapping[str, Tensor]) -> Update:
        """What `learn` has found, on the CPU by now, as an `Update`."""
        priorities = found["priorities"].numpy() if "priorities" in found else None
        metrics: dict[str, float] = {}
        if batch.measure:
            metrics = {name: value.item() for name, value in found.items() if name.startswith("learner/")}
            metrics |= self.learner.metrics()
        return Update(priorities, metrics)

    # --------------------------------------------------- parameters, checkpoints

    def params(self) -> dict[str, np.ndarray]:
        """Weights and statistics of the network, as views where it lives on the CPU."""
        return module_arrays(self.net)

    def load_params(self, params: dict[str, np.ndarray]) -> None:
        """Copies `params` into the network."""
        try:
            self.net.load_state_dict(tensors(params))
        # torch lists every missing and every unexpected name, over many lines; the first says enough.
        except RuntimeError as error:
            raise ConfigError(
                f"parameters do not fit the network: {_first_line(error)}; use the run's own config"
            ) from None

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The network, the optimiser's moments, update count, and what else the learner holds."""
        learner = self.learner
        arrays = prefixed("net/", self.params())
        arrays |= prefixed("optimizer/", optimizer_arrays(learner.optimizer))
        arrays |= learner.arrays()
        return arrays, {"algorithm": self.config.algorithm, "updates": learner.updates}

    def load_state(
        self, arrays: dict[str, np.ndarray], meta: dict[str, Any], *, to_learn: bool = True
    ) -> None:
        """Restores what `state` gave, or only the network."""
        with _checkpoint_of(self.config.algorithm, meta):
            self.net.load_state_dict(tensors(below("net/", arrays)))
            # An evaluator, or a new run with `init_from`, wants the network only: it has no optimiser, or
            # another one.
            if to_learn:
                learner = self.learner
                load_optimizer(learner.optimizer, below("optimizer/", arrays))
                learner.load_arrays(arrays)
                learner.updates = int(meta["updates"])
                learner.taken_over += 1

    def _to_device(self, array: np.ndarray) -> Tensor:
        return on_device(array, self.device)


def suited(config: PixelAgentConfig, spec: EnvSpec, make: Callable[[str], Network]) -> Network:
    """A network with `config.torso`, or for `auto` with the one that the observations are for.

    That is `config.pixel_torso`, for pictures under 20 x 20 `minatar`, for vectors `mlp`.

    Raises ConfigError where the observations are not for the torso.
    """
    torso: str = config.torso
    pixel_torso = config.pixel_torso
    sides = picture_sides(spec)
    pixels = bool(sides)
    # The strides of the torsos for Atari leave nothing of pictures under 20 x 20.
    if pixels and min(sides) < MIN_SIDE:
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


def network_inputs(
    config: PixelAgentConfig, spec: EnvSpec, *, vectors: bool = False
) -> NormalizedPixels | PackedPixels | Normalizer | PartInputs | None:
    """What the network sees of observations; `vectors`: numbers are normalised; None: see `SequenceBody`."""
    limit = config.normalize_pixels_frames
    if spec.obs_leaves:
        return PartInputs(spec.obs_leaves, pixels=config.normalize_pixels, limit=limit, vectors=vectors)
    # Deviations of vectors differ by orders of magnitude between positions; beyond 10 of them it is an
    # outlier, such as a contact force, that would rule the gradient.
    if vectors and not spec.pixels:
        return Normalizer(spec.obs_shape, clip=10.0)
    pixels: NormalizedPixels | None = None
    if config.normalize_pixels and spec.pixels:
        *channels, height, width = spec.seen_shape[1:] if spec.stack else spec.seen_shape
        # Statistics of pixels would treat the codes of words as brightness.
        height -= bool(spec.instruction_words)  # the last row of pixels is words
        pixels = NormalizedPixels((*channels, height, width), spec.stack, limit)
    return PackedPixels(pixels or ScaledPixels()) if spec.packed_bits else pixels


def body_options(config: RecurrentAgentConfig, spec: EnvSpec) -> dict[str, Any]:
    """Arguments of a `SequenceBody` apart from its shapes and torso."""
    return {
        "hidden_units": config.hidden_units,
        "mlp_units": config.mlp_units,
        "lstm_units": config.lstm_units,
        "lstm_layers": config.lstm_layers,
        "see_last_step": config.see_last_step,
        "instruction_words": spec.instruction_words,
        "inputs": network_inputs(config, spec),
    }


def _check_size(make: Callable[[], nn.Module]) -> None:
    """Raise ConfigError where the network that `make` returns is larger than this machine's memory."""
    with torch.device("meta"):  # shapes without data, in milliseconds
        net = make()
    wanted = sum(each.nbytes for each in itertools.chain(net.parameters(), net.buffers()))
    limit = memory_limit_bytes()
    if wanted > limit:
        raise ConfigError(
            f"the network would need {wanted / 2**30:,.1f} GiB of the {limit / 2**30:,.1f} GiB of memory "
            "here: lower agent.*_units and agent.*_layers"
        )


@contextlib.contextmanager
def _checkpoint_of(algorithm: str, meta: Mapping[str, Any]) -> Iterator[None]:
    """Around the loading of a checkpoint; raises CheckpointError where it is of another agent or network."""
    if not isinstance(meta, Mapping):
        raise CheckpointError("the checkpoint does not describe its agent")
    if meta.get("algorithm") != algorithm:
        raise CheckpointError(f"the checkpoint is of algorithm {meta.get('algorithm')!r}, not {algorithm!r}")
    try:
        yield
    except (RuntimeError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise MisfitError(f"the checkpoint does not fit this network: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """What went wrong, in one line."""
    return " ".join(str(error).split())[:200]
