"""Agents that learn to match what they see."""

from troupe.common.config.env_section import EnvConfig


def match(actions, **fields):
    return EnvConfig(
        id="tests.envs.matching:Match-v0", kwargs={"actions": actions}, reward_clip="none", **fields
    )
