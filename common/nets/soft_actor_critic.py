"""A policy beside several critics, which value an action that is given, or every one of several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from troupe.common.nets.parts import PartInputs, PartsTorso
from troupe.common.nets.perceptron import Perceptron
from troupe.common.nets.pixels import NormalizedPixels, PackedPixels, ScaledPixels
from troupe.common.nets.recurrent import LstmCore, encoded, last_step
from troupe.common.nets.torsos import Projected, Style, VectorTorso, make_torso
from troupe.common.rl.normalizers import Normalizer, ReturnScale
from troupe.common.rl.policy_losses import Multiplier
from troupe.common.spaces import ActionSpec

LARGEST = 1e4
"""Numbers of an observation are cut to this: after ReLUs the square of what follows is finite then."""


class SoftActorCritic(nn.Module):
    """Perceptrons of ReLUs on what is seen: the policy, the critics, and a value function if it is wanted.

    Vectors are what each of them sees. Pictures go through one encoder, which only critics and the value
    function teach: a gradient of the policy through it makes learning unstable (Yarats et al. 2021,
    section 5).

    With memory an LSTM is on top of that, taught in the same way, and all see what it remembers beside what
    is seen now. One memory is enough for all critics: it is of what was done, and the action that they are
    asked about comes in above it.

    Args:
        obs_shape: shape of one observation.
        actions: one choice, several choices, or real numbers.
        torso: `mlp`, or a name of `troupe.common.nets.torsos.PIXEL_TORSOS`.
        policy_size: parameters of the policy's distribution.
        critics: how many.
        values: whether there is a value function.
        hidden_units: width of the layer on top of a pixel torso.
        mlp_units: widths of the perceptrons' hidden layers.
        lstm_units: width of the memory; 0: none.
        lstm_layers: layers of the memory.
        see_last_step: feed the memory with the last action and the clipped last reward too.
        inputs: what is seen of pixels, of numbers or of several parts; None: pixels divided by 255, numbers
          as they are.
        entropy_cost: what a nat of the policy's entropy is worth; kept here because valuing needs it. None:
          nothing.
        scale: what rewards are divided by, and values are in units of; None: nothing.
        places: least value, greatest value, and how many evenly spaced ones the critics give chances of, each
          of the one action that it is asked about; None: they give the mean.
        mean_counts: of several critics the mean value counts, not the least.
        layer_norm: normalise what hidden layers bring forth, before ReLU.
    """

    places: Tensor

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        actions: ActionSpec,
        torso: str,
        *,
        policy_size: int,
        critics: int,
        values: bool,
        hidden_units: int,
        mlp_units: tuple[int, ...],
        inputs: NormalizedPixels | PackedPixels | Normalizer | PartInputs | None,
        lstm_units: int = 0,
        lstm_layers: int = 1,
        see_last_step: bool = False,
        entropy_cost: Multiplier | None = None,
        scale: ReturnScale | None = None,
        places: tuple[float, float, int] | None = None,
        mean_counts: bool = False,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.entropy_cost = entropy_cost or Multiplier(0.0, None, at_most=False)
        self.inputs: nn.Module | None = inputs if torso == "mlp" else inputs or ScaledPixels()
        self.encoder: nn.Module | None = None
        width = VectorTorso(obs_shape, ()).features
        if isinstance(inputs, PartInputs):
            width = sum(inputs.widths)
            if any(leaf.picture for leaf in inputs.leaves):
                self.encoder = PartsTorso(inputs, torso, hidden_units, mlp_units)
        elif torso != "mlp":
            self.encoder = Projected(make_torso(torso, obs_shape, ()), hidden_units)
        if self.encoder is not None:
            width = int(self.encoder.features)
        self.actions = actions
        self.see_last_step = see_last_step and lstm_units > 0
        self.core: LstmCore | None = None
        self.state_size = 0
        if lstm_units:
            told = actions.encoded_size + 1 if see_last_step else 0
            self.core = LstmCore(width + told, lstm_units, lstm_layers)
            self.state_size = self.core.state_size
            width += lstm_units
        self.categorical = places is not None
        self.mean_counts = mean_counts
        # No part of what is published or saved: the configuration says it.
        self.register_buffer("places", torch.linspace(*(places or (0.0, 0.0, 1))), persistent=False)
        style = Style(activation="relu", layer_norm=layer_norm)
        self.policy = Perceptron(width, mlp_units, policy_size, "policy", style)
        # For one choice a critic gives a Q for every action; else it is asked about one, which it is fed.
        with_action = width if actions.count else width + actions.encoded_size
        outputs = len(self.places) * (actions.count or 1)
        self.critics = nn.ModuleList(
            Perceptron(with_action, mlp_units, outputs, "values", style) for _ in range(critics)
        )
        self.values = Perceptron(width, mlp_units, 1, "values", style) if values else None

    def encode(self, obs: Tensor) -> Tensor:
        """Map observations `[B, *obs_shape]` to features `[B, F]`."""
        seen: Tensor = obs if self.inputs is None else self.inputs(obs)
        if self.encoder is not None:
            encoded: Tensor = self.encoder(seen)
            return encoded
        return seen.flatten(1).to(torch.float32).clamp(-LARGEST, LARGEST)

    def remember(
        self, obs: Tensor, last_action: Tensor, last_reward: Tensor, first: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Features `[T, B, F]` of a sequence, and the memory after it; see `SequenceBody.remember`."""
        seen = self.encode(obs.flatten(0, 1)).unflatten(0, first.shape)
        if self.core is None:
            return seen, state
        told = [last_step(last_action, last_reward, first, self.actions)] if self.see_last_step else []
        remembered, state = self.core(torch.cat([seen, *told], dim=-1), first, state)
        return torch.cat([seen, remembered], dim=-1), state

    def q(self, features: Tensor, actions: Tensor | None = None) -> Tensor:
        """What each critic says of `actions` `[B, numbers]`: `[n, B]`; or of every choice: `[n, B, A]`."""
        if self.actions.count:
            return torch.stack([critic(features) for critic in self.critics])
        assert actions is not None
        said = self.said(features, actions)
        return said.softmax(-1) @ self.places if self.categorical else said.squeeze(-1)

    def q_taken(self, features: Tensor, actions: Tensor) -> Tensor:
        """Each critic's Q `[n, B]` of actions `[B, ...]` that were done."""
        if not self.actions.count:
            return self.q(features, actions)
        q = self.q(features)
        return q.gather(2, actions[:, None].expand(len(q), -1, -1)).squeeze(2)

    def said(self, features: Tensor, actions: Tensor) -> Tensor:
        """What each critic gives for `actions` `[B, numbers]`: `[n, B, places]`, logits, or `[n, B, 1]`."""
        told = [actions] if self.actions.reals else encoded(actions, self.actions)
        both = torch.cat([features, *told], dim=1)
        return torch.stack([critic(both) for critic in self.critics])

    def agreed(self, q: Tensor) -> Tensor:
        """Of what each critic says, `[n, ...]`, what counts: the least, or the mean."""
        return q.mean(0) if self.mean_counts else q.amin(0)

    def agreed_chances(self, features: Tensor, actions: Tensor) -> Tensor:
        """Chances `[B, places]`: those of the critic with the least mean, or the mean of all."""
        chances = self.said(features, actions).softmax(-1)
        if self.mean_counts:
            return chances.mean(0)
        rows = torch.arange(chances.shape[1], device=chances.device)
        return chances[(chances @ self.places).argmin(0), rows]

    def value(self, features: Tensor) -> Tensor:
        """What the value function says, `[B]`."""
        assert self.values is not None
        value: Tensor = self.values(features).squeeze(1)
        return value

    @contextlib.contextmanager
    def critics_fixed(self) -> Iterator[None]:
        """Within it gradients flow through the critics and not to them: they judge, and do not learn."""
        self.critics.requires_grad_(False)
        try:
            yield
        finally:
            self.critics.requires_grad_(True)

    def compute_in_bfloat16(self) -> None:
        """From now on the perceptrons' products are short, see `Perceptron`."""
        for module in self.modules():
            if isinstance(module, Perceptron):
                module.short = True

    def observe(self, obs: Tensor) -> None:
        """Take observations `[B, *obs_shape]` into the inputs' statistics."""
        if self.inputs is not None:
            self.inputs.observe(obs)  # type: ignore[operator]
