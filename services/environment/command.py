"""`troupe env check`: what an environment shows, and whether it can be trained on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from troupe.common.config import Config, Loaded, load_layers
from troupe.common.config.field_options import field_parser, parse_with_fields
from troupe.common.envs import EnvSpec, check_settings
from troupe.common.envs.base import clip_rewards
from troupe.common.envs.goals import ACHIEVED, DESIRED
from troupe.common.families import outside_families
from troupe.common.runtime.parser import integer
from troupe.common.spaces import Leaf
from troupe.services.environment import check as checking

_GOALS = "learn from hindsight with --actor.hindsight_copies 4 (apex or sac; see docs/hindsight.md)"
SECONDS = 20.0
"""Of playing at most, where somebody asks."""


def check_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe env check`."""
    parser = field_parser(
        "env check",
        "ID [OPTION ...]",
        "Play an environment with random actions in a separate process, and report what the network sees,\n"
        "how episodes end, how fast it runs and what Gymnasium's own checker says. If the environment keeps\n"
        "failing, hangs or crashes, the exit code is 2, and one line names the step, the slot and the\n"
        "cause. The checker's remarks do not affect the exit code.",
    )
    # Not in the help of ID, of which docs/commands.md is made.
    if outside := ", ".join(f"{name}:ID of {module}" for name, module in outside_families().items()):
        parser.epilog = f"installed families: {outside}\n\n{parser.epilog}"
    parser.add_argument("id", metavar="ID", help="such as gym:CartPole-v1; see env.id")
    parser.add_argument(
        "--steps", type=integer(1), default=100, metavar="N", help="steps to play (default: 100)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def check(words: Sequence[str]) -> int:
    """Play an environment for a moment, and say what it shows."""
    options, overrides = parse_with_fields(check_parser(), words)
    loaded = load_layers(None, options.sweep, {**overrides, "env.id": options.id}, os.environ)
    check_and_print(loaded, options.steps, options.json)
    return 0


def check_and_print(loaded: Loaded, steps: int, as_json: bool) -> None:
    """Play, ask Gymnasium's own checker, and print what was found; ConfigError where it is broken."""
    began_s, config = time.monotonic(), loaded.config.env
    # 0 turns the check before a training off; somebody who asks for it wants one.
    timeout_s = config.check_timeout_s or 60.0
    findings = checking.check(config, steps=steps, seconds=SECONDS, timeout_s=timeout_s, thorough=True)
    check_settings(config, findings.spec, loaded.chosen("env"))
    if as_json:
        learned = learned_range(findings.reward_range, loaded.config)
        print(json.dumps({**dataclasses.asdict(findings), "learned_range": learned}))
        return
    rows = _rows(findings, learned_range(findings.reward_range, loaded.config))
    print("\n".join(f"{label:<14} {text}" for label, text in rows))
    print(f"The environment works (checked in {time.monotonic() - began_s:.1f} s).")


def learned_range(raw: tuple[float, float], config: Config) -> tuple[float, float]:
    """Return what a configuration makes of the smallest and the largest reward before it learns from them."""
    # In the order in which a training applies them: in the environment, in the loss, then the scale. All are
    # monotone, so the ends of the range stay its ends.
    low, high = clip_rewards(np.asarray(raw), config.env.reward_clip).tolist()
    mode: Any = getattr(config.agent, "reward_clip", "none")
    if mode != "none":
        import torch

        from troupe.common.rl.policy import clip_reward

        low, high = clip_reward(torch.tensor([low, high], dtype=torch.float64), mode).tolist()
    scale = getattr(config.agent, "reward_scale", 1.0)
    return low * scale, high * scale


def _rows(found: checking.Findings, learned: tuple[float, float]) -> list[tuple[str, str]]:
    spec = found.spec
    frames = f" of {spec.frames_per_step} frames each" if spec.frames_per_step > 1 else ""
    if spec.obs_leaves:
        parts = zip(spec.obs_leaves, found.observation_ranges, strict=True)
        gets = "; ".join(_part(leaf, *between) for leaf, between in parts)
    elif spec.packed_bits:
        gets = f"uint8 images {list(spec.seen_shape)}, each pixel 0 or 255, sent and stored as bits"
    else:
        kind, (between,) = "images" if spec.pixels else "numbers", found.observation_ranges
        gets = f"{spec.obs_dtype} {kind} {list(spec.obs_shape)}{_range(*between)}"
    rows = [
        ("environment", spec.id),
        *([("observation", found.observation_space)] if found.observation_space else []),
        ("network sees", gets),
        *(
            [("goals", _GOALS)]
            if {(ACHIEVED,), (DESIRED,)} <= {leaf.path for leaf in spec.obs_leaves}
            else []
        ),
        *([("agents", _agents(spec))] if spec.agents > 1 else []),
        ("actions", f"{spec.actions} {found.action_space}".rstrip()),
        ("played", f"{found.steps} random steps{frames}"),
        ("rewards", f"{_between(*found.reward_range)}; {_learned(found.reward_range, learned)}"),
        ("episode ends", f"{found.terminated} terminated, {found.truncated} truncated"),
        ("episodes", _games(found.episodes, found.steps)),
        *([("failures", failures_of(found))] if found.failures else []),
        ("speed", f"{found.frames_per_s:,.0f} frames per second in one thread"),
    ]
    for objection in found.objections or []:
        rows.append(("warning", objection))
    if found.objections == []:
        rows.append(("gymnasium", "its checker found nothing wrong"))
    return rows


def _agents(spec: EnvSpec) -> str:
    roles = f", of the roles {', '.join(spec.tasks)}" if spec.tasks else ""
    return f"{spec.agents} in a game, each in a slot of its own{roles}"


def _learned(raw: tuple[float, float], learned: tuple[float, float]) -> str:
    if learned == raw:
        return "used for learning unchanged"
    return f"used for learning: {_between(*learned)} (env.reward_clip, agent.reward_clip, agent.reward_scale)"


def _range(low: float, high: float) -> str:
    return f", {_between(low, high)}"


def _between(low: float, high: float) -> str:
    low, high = low + 0.0, high + 0.0  # -0.0 + 0.0 is 0.0
    return f"from {low:g} to {high:g}" if low < high else f"always {low:g}"


def _part(leaf: Leaf, low: float, high: float) -> str:
    """Return a part of an observation in a few words."""
    name = ".".join(map(str, leaf.path))
    if leaf.choices:
        many = len(leaf.choices)
        what = f"{many} discrete values" if many > 1 else f"one of {leaf.choices[0]} discrete values"
    else:
        what = f"{leaf.dtype} {'image' if leaf.picture else 'numbers'} {list(leaf.shape)}"
        what += _range(low, high)
    return f"{name}: {what}" if name else what


def failures_of(found: checking.Findings) -> str:
    """Return in one line how often an environment failed; training tolerates that."""
    times = "once" if found.failures == 1 else f"{found.failures} times"
    return f"it failed {times} in {found.steps} steps; the first failure: {found.first_failure}"


def _games(games: list[tuple[float, int]], played: int) -> str:
    if not games:
        return f"none finished in {played} steps over all copies: --steps {10 * played} plays longer"
    scores, steps = [game[0] for game in games], [game[1] for game in games]
    mean = sum(scores) / len(games)
    lengths = f"{min(steps)} to {max(steps)} steps" if min(steps) < max(steps) else f"{steps[0]} steps each"
    return f"{len(games)} finished, mean return {mean:g}, {lengths}"
