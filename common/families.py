"""Every family of environments: what the dispatch, the help, the messages and the documents know of it.

A family outside this tree is an entry point of an installed package in the group `troupe.families`: its name
begins the ids, its value is the module that makes the environments.
"""

from __future__ import annotations

from dataclasses import dataclass

from troupe.common.installation import entry_point, entry_points


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
    "vector": Family("gymnasium_vector", "vector:package.module:ID"),
    "envpool": Family("envpool", "envpool:TASK", extra="envpool", packages=("envpool",)),
    "old_gym": Family("gymnasium_envs", "old_gym:package.module:ID"),
}
"""Those of this tree, by how their ids begin. A beginning that no family has, here or outside, is a module
that registers environments with Gymnasium."""
ENTRY_POINTS = "troupe.families"

_OF_A_MODULE = "package.module:ID"
FORMS = (*(family.form for family in FAMILIES.values()), _OF_A_MODULE)
"""Of all ids, apart from those of families outside this tree."""
EXTRAS = {package: family.extra for family in FAMILIES.values() for package in family.packages}
"""The extra that brings a package."""


def outside_families() -> dict[str, str]:
    """The modules of the families outside this tree that are installed, by name; ours have the first word."""
    return {name: module for name, module in entry_points(ENTRY_POINTS).items() if name not in FAMILIES}


def outside_family(name: str) -> str:
    """The module of a family outside this tree; empty where none is installed. See `entry_point`."""
    return "" if name in FAMILIES else entry_point(ENTRY_POINTS, name)


def installed_forms() -> list[str]:
    """`FORMS`, and those of the families outside this tree that are installed."""
    return [*FORMS[:-1], *(f"{name}:ID" for name in outside_families()), _OF_A_MODULE]
