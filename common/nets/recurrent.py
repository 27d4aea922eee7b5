"""Memory: an LSTM that starts anew where an episode does, what it is fed, and the torso below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from troupe.common.nets.language import InstructionEncoder, split_instruction
from troupe.common.nets.parts import PartInputs, PartsTorso
from troupe.common.nets.pixels import NormalizedPixels, PackedPixels, ScaledPixels
from troupe.common.nets.torsos import PLAIN, Projected, Style, make_torso
from troupe.common.rl.fixed import one_hot, shapes_are_fixed
from troupe.common.rl.normalizers import Normalizer
from troupe.common.spaces import ActionSpec, runs


def exact(head: nn.Module, features: Tensor) -> Tensor:
    """What last layers make of features, float32 also within autocast.

    What they say is compared: values with returns, and the chances of an action with those that it was drawn
    with. Values round 100 are half a unit apart in bfloat16.
    """
    kind = features.device.type
    if not torch.is_autocast_enabled(kind):
        said: Tensor = head(features)
        return said
    with torch.autocast(kind, enabled=False):
        said = head(features.float())
    return said


class LstmCore(nn.Module):
    """LSTM over time-major sequences in which episodes begin.

    The state is one flat row for each sequence, `[B, state_size]`: hidden states of all layers, then their
    cell states. A new episode starts from zeros.
    """

    def __init__(self, features: int, units: int, layers: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, units, num_layers=layers)
        self.features = units
        self.state_size = 2 * layers * units

    def forward(self, inputs: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run through a sequence.

        Args:
            inputs: `[T, B, features]` float.
            first: `[T, B]` bool, an episode begins at this step: the state is forgotten *before* it.
            state: `[B, state_size]` float, from before the first step.

        Returns:
            outputs `[T, B, units]`, and the state after the last step.
        """
        hidden, cell = self._unpacked(state)
        if shapes_are_fixed():
            return self._step_by_step(inputs, first, list(hidden), list(cell))
        outputs = []
        # Between two steps at which any sequence begins an episode, the LSTM runs undisturbed, in one call.
        # A whole segment is one call of cuDNN or MKL, where a loop would make one for each step.
        starts = first.any(dim=1).nonzero().squeeze(1).tolist()
        edges = sorted({0, *starts, len(inputs)})
        for begin, end in pairwise(edges):
            keep = (~first[begin]).to(inputs.dtype)[None, :, None]
            segment, (hidden, cell) = self.lstm(inputs[begin:end], (hidden * keep, cell * keep))
            outputs.append(segment)
        return torch.cat(outputs), self._packed(hidden, cell)

    def _step_by_step(
        self, inputs: Tensor, first: Tensor, hidden: list[Tensor], cell: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The same wherever episodes begin: each step is a call, of which a graph launches none."""
        outputs = []
        keep = (~first).to(inputs.dtype)[..., None]
        for step, kept in zip(inputs.unbind(), keep.unbind(), strict=True):
            for layer, weights in enumerate(self.lstm.all_weights):
                before = hidden[layer] * kept, cell[layer] * kept
                hidden[layer], cell[layer] = torch.lstm_cell(step, before, *weights)
                step = hidden[layer]
            outputs.append(step)
        return torch.stack(outputs), self._packed(torch.stack(hidden), torch.stack(cell))

    def _unpacked(self, state: Tensor) -> tuple[Tensor, Tensor]:
        layers, units = self.lstm.num_layers, self.lstm.hidden_size
        # torch wants `[layers, B, units]`; in chunks a state is a row, for replay knows arrays by rows.
        parts = state.view(len(state), 2, layers, units).permute(1, 2, 0, 3).contiguous()
        return parts[0], parts[1]

    def _packed(self, hidden: Tensor, cell: Tensor) -> Tensor:
        return torch.stack([hidden, cell]).permute(2, 0, 1, 3).flatten(1)


def last_step(last_action: Tensor, last_reward: Tensor, first: Tensor, actions: ActionSpec) -> Tensor:
    """What the agent did and got just before, as features: one-hot action, and reward clipped to [-1, 1].

    Args:
        last_action: `[..., *actions.shape]`; real numbers stay as they are, but are clipped too.
        last_reward: `[...]` float.
        first: `[...]` bool; where an episode begins there was no last step, and all features are 0.
        actions: what is chosen, of E numbers when encoded.

    Returns:
        `[..., E + 1]` float. Espeholt et al. 2018, figure 3.
    """
    features = torch.cat([*encoded(last_action, actions), last_reward.clamp(-1.0, 1.0).unsqueeze(-1)], dim=-1)
    return features * (~first).to(torch.float32).unsqueeze(-1)


def encoded(rows: Tensor, actions: ActionSpec) -> Iterator[Tensor]:
    """Features of actions, part by part."""
    if actions.count:
        yield one_hot(rows, actions.count).to(torch.float32)
        return
    begin = 0
    for numbers, count in runs(actions.choices):
        # Stored rows are a peer's: an index that is not there is an error in `one_hot`, and on CUDA the end
        # of the process.
        chosen = rows[..., begin : begin + numbers].long().clamp(0, count - 1)
        yield one_hot(chosen, count).flatten(-2).to(torch.float32)
        begin += numbers
    if actions.reals:
        yield rows[..., begin:].clamp(-1.0, 1.0)


class SequenceBody(nn.Module):
    """Torso, features of the last step, memory: what is below the heads. Everything is time-major.

    Args:
        obs_shape: shape of one observation, `(C, H, W)` for pixels.
        actions: what is chosen.
        torso: `mlp`, or a name of `troupe.common.nets.torsos.PIXEL_TORSOS`.
        hidden_units: width of the layer that follows a pixel torso.
        mlp_units: widths of the `mlp` torso.
        lstm_units: width of the memory; 0: none.
        lstm_layers: layers of the memory.
        see_last_step: feed the last action and the clipped last reward beside the observation.
        instruction_words: words of an instruction in the last row of pixels; 0: there is none.
        inputs: what the torso sees of observations; None: pixels divided by 255, vectors as they are.
          Of observations of several parts: what makes numbers of them.
        style: of the torso's layers.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        actions: ActionSpec,
        torso: str,
        *,
        hidden_units: int = 256,
        mlp_units: tuple[int, ...] = (64, 64),
        lstm_units: int = 0,
        lstm_layers: int = 1,
        see_last_step: bool = True,
        instruction_words: int = 0,
        inputs: NormalizedPixels | PackedPixels | Normalizer | PartInputs | None = None,
        style: Style = PLAIN,
    ) -> None:
        super().__init__()
        self.instruction_words = instruction_words
        self.instructions = InstructionEncoder() if instruction_words else None
        if self.instructions is not None:
            obs_shape = (*obs_shape[:-2], obs_shape[-2] - 1, obs_shape[-1])
        self.inputs = inputs if torso == "mlp" else inputs or ScaledPixels()
        if isinstance(inputs, PartInputs):
            self.torso: nn.Module = PartsTorso(inputs, torso, hidden_units, mlp_units, style)
        else:
            base = make_torso(torso, obs_shape, mlp_units, style)
            self.torso = base if torso == "mlp" else Projected(base, hidden_units, style)
        self.actions = actions
        self.see_last_step = see_last_step
        features = int(self.torso.features) + (actions.encoded_size + 1 if see_last_step else 0)
        features += self.instructions.features if self.instructions is not None else 0
        self.core = LstmCore(features, lstm_units, lstm_layers) if lstm_units else None
        self.state_size = self.core.state_size if self.core else 0
        self.features = self.core.features if self.core else features

    def remember(
        self, obs: Tensor, last_action: Tensor, last_reward: Tensor, first: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run through a sequence, or one step of it.

        Args:
            obs: `[T, B, *obs_shape]`, or images that `seen` made of pixels.
            last_action: `[T, B, *actions.shape]`, done just before each observation.
            last_reward: `[T, B]` float, got just before it.
            first: `[T, B]` bool, an episode begins with this observation.
            state: `[B, state_size]` float, the memory before the first step.

        Returns:
            features `[T, B, features]`, and the memory `[B, state_size]` after the last step.
        """
        words = []
        if self.instructions is not None:
            rows, ids = split_instruction(obs.flatten(0, 1), self.instruction_words)
            obs = rows.unflatten(0, first.shape)
            words.append(self.instructions(ids).unflatten(0, first.shape))
        return self.remember_seen(self.seen(obs), last_action, last_reward, first, state, words)

    def seen(self, obs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the torso sees of observations `[T, B, *obs_shape]` without instructions; `[T, B, ...]`.

        Of pixels this may be done once for several passes: images stay as they are.
        """
        if self.inputs is None:
            return obs
        return self.inputs(obs.flatten(0, 1), dtype).unflatten(0, obs.shape[:2])

    def remember_seen(
        self,
        seen: Tensor,
        last_action: Tensor,
        last_reward: Tensor,
        first: Tensor,
        state: Tensor,
        words: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """`remember` of what `seen` gave, and of features of `words` `[T, B, ...]` if there are any."""
        parts = [self.torso(seen.flatten(0, 1)).unflatten(0, first.shape), *words]
        if self.see_last_step:
            parts.append(last_step(last_action, last_reward, first, self.actions))
        features = torch.cat(parts, dim=-1)
        if self.core is not None:
            features, state = self.core(features, first, state)
        return features, state

    def observe(self, obs: Tensor, counts: Tensor | None = None) -> None:
        """Take observations `[T, B, *obs_shape]`, where `counts` `[T, B]`, into the inputs' statistics."""
        if self.inputs is not None:
            rows = obs[..., :-1, :] if self.instruction_words else obs
            self.inputs.observe(rows, counts)
