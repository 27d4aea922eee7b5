"""Writes what is generated from the schema: `python -m docs.configuration > docs/configuration.md`.

With `presets`, it writes docs/presets.md; with `compose`, deploy/docker/fields.yml: the list of variables
that Docker Compose, which knows no wildcard, hands on to the learner.
"""

from __future__ import annotations

import sys

from troupe.common.config import load_config
from troupe.common.config.explain import FieldText, sections
from troupe.common.config.presets import preset_names, preset_summary
from troupe.common.families import FAMILIES

_HEAD = """\
# Configuration

<!-- Written by `make docs` from common/config/schema.py and common/agents/: edit those, not this page. -->

Every field of a run's configuration. `troupe config show PRESET` prints every value and the layer that set
it, `troupe config explain SECTION.FIELD` describes one field, and `troupe config validate` checks presets,
TOML files and run directories.

## Where a value comes from

For each field, the first of these that sets it wins:

1. the command line: `--replay.batch_size 64` or `--replay.batch-size=64` (`--env`, `--seed`, `--total-steps`,
      `--keys`, `--init-from` and `--offline` are short for `--env.id`, `--run.seed`, `--run.total_steps`,
   `--net.keys_dir`, `--learner.init_from` and `--run.offline`),
2. a sweep file: `--sweep FILE`, a TOML file like a preset. If it has a section `[sweep]`, it describes
   several runs: start them with [`troupe sweep FILE`](sweeps.md),
3. an environment variable: `TROUPE_REPLAY__BATCH_SIZE=64`,
4. on `troupe resume`: the `config.toml` of the run,
5. the preset: a name from `troupe presets`, or the path of a TOML file. A file that begins with
   `preset = "NAME"` overrides that preset or file. With `--algo NAME --env ID` instead: settings chosen for
   the algorithm and the environment (vectors, pixels or grids; discrete or continuous actions),
6. the default below.

Values on the command line and in environment variables are TOML (`5`, `1e-4`, `true`, `[256, 256]`,
`{render_mode = "rgb_array"}`), except for text fields, which take them literally. `none` clears an optional
field. To set one key of a table, use `--env.kwargs.render_mode rgb_array`. An invalid name or value ends the
command with exit code 2 and one line that suggests the nearest valid one.

## What may change when a run is resumed

| role | on `troupe resume` |
|---|---|
| structural | must not change: the network and the stored data depend on it |
| tunable | taken from the run, and may be changed; every change is printed |
| operational | never taken from the run: it belongs to the machine |

"""


def markdown() -> str:
    """Return the page."""
    lines = [_HEAD + "## Fields"]
    for section in sections():
        lines += ["", f"### `[{section.name}]` {section.summary}", ""]
        lines += ["| field | type | default | role | meaning |", "|---|---|---|---|---|"]
        lines += [_row(field) for field in section.fields]
        for field in filter(lambda field: field.parts, section.fields):
            lines += ["", f"### `[[{field.path}]]` One entry of `{field.path}`.", ""]
            lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
            lines += [_part_row(part) for part in field.parts]
    return "\n".join(lines) + "\n"


_PRESETS_HEAD = """\
# Presets

<!-- Written by `make docs` from the first lines of configs/*.toml: edit those, not this page. -->

A preset is a complete, tested configuration: `troupe train PRESET`. `troupe presets` lists them, and
`troupe config show PRESET` prints one with every value. [Results](results.md) has curves for many of them.
"""

# Presets by the family of their environments, or by the module of one.
_HEADINGS = {
    "troupe.common.envs.recall": "Memory",
    "troupe.common.envs.bit_flip": "Goals: [hindsight](hindsight.md)",
}


def _heading(family: str) -> str:
    if family not in FAMILIES:
        return _HEADINGS[family]
    known = FAMILIES[family]
    needs = f": `pip install -c constraints.txt -e '.[{known.extra}]'`" if known.extra != "actor" else ""
    return known.heading + (needs if known.extra else "")


_PRESETS_TAIL = """\

## Your own configuration

Without a preset, `troupe train --algo ppo --env gym:Acrobot-v1` chooses hyperparameters for the algorithm
and the kind of observations and actions. `troupe config show --algo ppo --env gym:Acrobot-v1` prints them.
They are a starting point, not tuned for that environment. On Atari, PPO uses the preset `atari-ppo`, and on
Pong `pong-ppo`. `--algo` takes

* `ppo` (or `policy_gradient`) and [`a2c`](policy-gradient.md#a2c): one agent;
* `apex`, and as options of it [`dqn`, `double_dqn` and `rainbow`](apex.md#dqn-double-dqn-and-rainbow);
* `impala`, `pqn`, `r2d2` and `sac`;
* `td3`, and as options of it [`ddpg`](sac.md#td3-and-ddpg), for continuous actions;
* `iql` and `td3_bc`, which learn from a data set.

A preset is a TOML file in [configs/](../configs/). `troupe train my.toml` uses your own. If it begins
with `preset = "cartpole-ppo"`, it needs only the values that differ from that preset.

To train the same algorithm on another game, change `env.id`: `troupe train pong-apex --env.id
atari:breakout`. For vector observations, start from a CartPole preset: `troupe train
cartpole-apex --env.id gym:Acrobot-v1`.
[Your own environment](environments.md#your-own-environment-in-ten-minutes) works the same way.
"""


def presets_page() -> str:
    """Return docs/presets.md: the presets, grouped by environment."""
    rows: dict[str, list[str]] = {family: [] for family in (*FAMILIES, *_HEADINGS)}
    for name in preset_names():
        config = load_config(name)
        family = config.env.id.partition(":")[0]
        cells = (f"`{name}`", f"`{config.agent.algorithm}`", preset_summary(name))
        rows[family].append("| " + " | ".join(map(_cell, cells)) + " |")
    lines = [_PRESETS_HEAD.rstrip("\n")]
    for family, presets in rows.items():
        if not presets:
            continue
        lines += [
            "",
            f"## {_heading(family)}",
            "",
            "| preset | algorithm | what for |",
            "|---|---|---|",
            *presets,
        ]
    return "\n".join(lines) + "\n" + _PRESETS_TAIL


_COMPOSE_HEAD = """\
# Written by `make docs` from common/config/schema.py and common/agents/: edit those, not this file.
# The fields of a run that variables may set; docker-compose.yml hands those that are set to the learner.
services:
  fields:
    environment:
"""


def compose_fields() -> str:
    """Return a Compose file with a variable for each field that belongs to the run."""
    paths = {
        # A dict, not a set: several algorithms have a field of the same path, and the order should be the
        # schema's.
        field.path: None
        for section in sections()
        for field in section.fields
        # Addresses and ports are a container's own affair; compose gives them service by service.
        if field.role != "operational" and field.path != "run.preset"
    }
    return _COMPOSE_HEAD + "".join(f"      TROUPE_{path.upper().replace('.', '__')}:\n" for path in paths)


def _row(field: FieldText) -> str:
    name = field.path.partition(".")[2]
    cells = (f"`{name}`", field.type, f"`{field.default}`", field.role, field.description)
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _part_row(part: FieldText) -> str:
    cells = (f"`{part.path}`", part.type, f"`{part.default}`", part.description)
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


if __name__ == "__main__":
    pages = {"presets": presets_page, "compose": compose_fields, "configuration": markdown}
    print(pages[(*sys.argv[1:], "configuration")[0]](), end="")
