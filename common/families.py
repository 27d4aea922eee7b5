"""Every family of environments: what the dispatch, the help, the messages and the documents know of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Environments whose ids begin alike.

    Attributes:
        module: of `troupe.common.envs`, which makes them.
        form: how their ids are written.
        heading: of its presets in docs/presets.md; empty where it has none.
        extra: of the installation, that brings what they need; empty for a family that needs something else.
        packages: that the extra brings; a message about a missing one names the extra.
        same_options: `env.kwargs` are options of the family, and mean the same for all of its environments.
    """

    module: str
    form: str
    heading: str = ""
    extra: str = ""
    packages: tuple[str, ...] = ()
    same_options: bool = False


FAMILIES = {
    "atari": Family("atari", "atari:GAME", "Atari", "actor", ("ale_py", "cv2")),
    "gym": Family("gymnasium_envs", "gym:ID", "Classic control", "actor", ("gymnasium",)),
    "minatar": Family(
        "minatar", "minatar:GAME", "MinAtar", extra="minatar", packages=("minatar",), same_options=True
    ),
    "mujoco": Family("gymnasium_envs", "mujoco:TASK", "MuJoCo", extra="mujoco", packages=("mujoco",)),
    "dm_control": Family(
        "dm_control", "dm_control:DOMAIN-TASK", extra="dm-control", packages=("dm_control",)
    ),
    "pettingzoo": Family(
        "pettingzoo_envs",
        "pettingzoo:ID",
        "Several agents",
        extra="pettingzoo",
        packages=("pettingzoo", "mpe2"),
    ),
    "dmlab": Family("dmlab", "dmlab:LEVEL", "DeepMind Lab: [its engine](environments.md)", same_options=True),
    "football": Family(
        "football",
        "football:SCENARIO",
        "Google Research Football: [its engine](environments.md)",
        same_options=True,
    ),
    "old_gym": Family("gymnasium_envs", "old_gym:package.module:ID"),
}
"""By how their ids begin. Any other beginning is a module that registers environments with Gymnasium."""

FORMS = (*(family.form for family in FAMILIES.values()), "package.module:ID")
"""Of all ids."""
EXTRAS = {package: family.extra for family in FAMILIES.values() for package in family.packages}
"""The extra that brings a package."""
