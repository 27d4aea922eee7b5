"""Every command of `troupe`, in the order of `troupe --help`.

`python -m troupe.services.commands > docs/commands.md` writes the page of them.
"""

from __future__ import annotations

import argparse

from troupe.common.config.field_options import EXIT_CODES
from troupe.common.runtime.commands import Command

_CLOUD = "troupe.services.cloud"
_CONFIGURATION = "troupe.services.configuration"
_EXPERIMENTS = "troupe.services.experiments.commands"
_EXPORT = "troupe.services.export.command"
_LAUNCHER = "troupe.services.launcher"
_REPLAY = "troupe.services.replay"

COMMANDS = {
    "train": Command("train on this machine, from a preset", "troupe.services.training:train"),
    "resume": Command("continue a run from its newest checkpoint", "troupe.services.training:resume"),
    "verify": Command(
        "repeat a deterministic run, and compare the weights",
        "troupe.services.training:verify",
    ),
    "eval": Command(
        "play full episodes with a run's newest checkpoint, or a given one",
        "troupe.services.evaluator.evaluate:main",
        "troupe.services.evaluator.options:eval_parser",
    ),
    "sweep": Command(
        "train many runs: grids, seeds, suites, searches", "troupe.services.experiments.sweep_command:sweep"
    ),
    "slurm": Command("train on several nodes of a Slurm cluster", "troupe.services.slurm.command:slurm"),
    "cloud estimate": Command("estimate what a run in AWS costs", f"{_CLOUD}.command:estimate"),
    "cloud train": Command(
        "train in AWS until a goal is reached or a budget is used up", f"{_CLOUD}.train:train"
    ),
    "cloud stop": Command("end a run in AWS, fetch it and destroy the rest", f"{_CLOUD}.train:stop"),
    "runs": Command("list run directories: state, steps, last evaluation", f"{_EXPERIMENTS}:runs"),
    "compare": Command("compare runs: a table with intervals over seeds", f"{_EXPERIMENTS}:compare"),
    "plot": Command("draw the learning curves of runs", f"{_EXPERIMENTS}:plot"),
    "board": Command("show runs on a web page", "troupe.services.board.command:board"),
    "export": Command("write the policy into a file for other programs", f"{_EXPORT}:main"),
    "presets": Command("list the presets", f"{_CONFIGURATION}:presets"),
    "config show": Command("print every value, and the layer that set it", f"{_CONFIGURATION}:show"),
    "config validate": Command("check presets, TOML files or run directories", f"{_CONFIGURATION}:validate"),
    "config explain": Command("describe a field, a section or an algorithm", f"{_CONFIGURATION}:explain"),
    "env check": Command(
        "play an environment at random: what it returns, how fast, whether it works",
        "troupe.services.environment.command:check",
    ),
    "doctor": Command(
        "say what is wrong with this machine, a run directory or a running run",
        "troupe.services.doctor.command:doctor",
    ),
    "why": Command("say why runs do not learn, the likeliest cause first", "troupe.services.doctor.why:why"),
    "keys new": Command("create keys for a run on several machines", f"{_LAUNCHER}.make_keys:new"),
    "keys check": Command(
        "check the keys that a service of a role would load", f"{_LAUNCHER}.make_keys:check"
    ),
    "learner": Command("run only the learner", "troupe.services.learner.__main__:main"),
    "actor": Command("run only an actor process", "troupe.services.actor.__main__:main"),
    "evaluator": Command("run only the evaluator", "troupe.services.evaluator.__main__:main"),
    "replay serve": Command(
        "run only a replay shard, in a run or by itself (needs no torch)",
        f"{_REPLAY}.__main__:serve_shard",
        f"{_REPLAY}.options:serve_parser",
    ),
    "replay status": Command("print the status of a running shard", f"{_REPLAY}.__main__:status"),
    "replay snapshot": Command("copy the items of a running shard", f"{_REPLAY}.__main__:snapshot"),
    "replay import": Command(
        "write a Minari data set into folders of replay shards",
        "troupe.services.offline.importing:replay_import",
    ),
    "replay export": Command(
        "write the whole episodes that replay holds into a Minari data set",
        "troupe.services.offline.exporting:replay_export",
    ),
}

_HEAD = """\
# Commands

<!-- Written by `make docs` from the commands' own parsers: edit those, not this page. -->

To complete commands, presets, options and fields with the Tab key (except fields of `[agent]`), add
`eval "$(register-python-argcomplete troupe)"` to `~/.bashrc` or `~/.zshrc`. `troupe COMMAND --help` prints
the text below. Commands that take `--SECTION.FIELD VALUE` take every [field of the
configuration](configuration.md); `troupe config explain` lists them. If an option or a value is invalid, one
line says so and names the nearest valid one. `make help` lists the targets for developers and for the cloud.

"""


def page() -> str:
    """Return docs/commands.md."""
    lines = [_HEAD + EXIT_CODES.replace("exit codes", "Exit codes").replace("\n", " ") + ".", ""]
    lines += ["| command | what it does |", "|---|---|"]
    lines += [
        f"| [`troupe {name}`](#troupe-{name.replace(' ', '-')}) | {command.summary} |"
        for name, command in COMMANDS.items()
    ]
    for name, command in COMMANDS.items():
        parser = command.make_parser()
        lines += ["", f"## troupe {name}", "", " ".join((parser.description or "").split()), ""]
        lines += ["| argument | meaning |", "|---|---|"]
        actions = [action for action in parser._actions if action.dest != "help"]
        lines += [_row(action) for action in sorted(actions, key=lambda action: bool(action.option_strings))]
        if getattr(parser, "takes_fields", False):
            lines += ["| `--SECTION.FIELD VALUE` | a [field of the configuration](configuration.md) |"]
    return "\n".join(lines) + "\n"


def _row(action: argparse.Action) -> str:
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
    value = value if isinstance(value, str) else " ".join(value)
    if action.option_strings and action.nargs != 0 and not value:
        value = action.dest.upper()
    name = ", ".join(action.option_strings)
    text = (action.help or "") % {"default": action.default}
    shown = " ".join(filter(None, (name, value if action.nargs != 0 else "")))
    cells = (f"`{shown}`", " ".join(text.split()))
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(page(), end="")
