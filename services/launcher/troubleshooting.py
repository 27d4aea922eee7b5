"""docs/troubleshooting.md, from the table of findings.

`python -m troupe.services.launcher.troubleshooting` prints it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from troupe.services.launcher.findings import LIMITS, Limit
from troupe.services.launcher.learning import FAULTS, Fault

_HEAD = """\
# What is wrong, slow, or does not learn

<!-- Written by `make docs` from findings.py, learning.py, troubleshooting.py in services/launcher. -->

```sh
troupe doctor                          # this machine
troupe doctor runs/my-run              # and a run directory
troupe doctor tcp://learner:5550       # and a running run, as its learner tells a viewer (--keys DIR)
```

prints a line for everything it looks at: what that is, the figure, and `ok`, `note` or `wrong` with what to
do. The exit code is 0 where nothing is wrong and 7 otherwise; `--json` prints the same for programs.

| area | what is looked at |
|---|---|
| versions, clocks | of this machine and of a run's members; clocks may be a second apart |
| ports | whether `net.control`, `net.announce`, `net.replay` and others can be bound, and who has them |
| keys | files, their modes, the allow-list, and with an address whether they open it |
| limits | open files, locked memory, memory and cores of this user or container, shared memory |
| disk | forced writes, measured for a second; room for checkpoints and for what replay may grow to |
| processor, threads, gpu | bfloat16 and vector units, threads of numeric libraries, what torch sees |
| packages | what each family of environments needs, and extras |
| run | the last error of each log, hashes of the newest checkpoints, replay's files, writes that failed |
| members | who has said nothing for a while, and what each said went wrong |
| limits of the run | everything of the next section that holds, the loudest first |
| learning | everything of [the section after it](#why-a-run-does-not-learn) that holds, the likeliest first |

## What limits a run

The panel and the lines of `troupe train` name the loudest of these: what costs the largest share of the
run's time. Those at the end name a side of the run, and are said where nothing explains as much of it.
[metrics.md](metrics.md) says what the figures are.

| symptom | name | measured by | what helps |
|---|---|---|---|
"""

_TAIL = """
Fields of `[replay]` such as `compression` and `capacity_items` belong to a new run: a resumed one keeps its
own. What services print while they wait is explained in [services.md](services.md#what-they-print), and what
each failure looks like in [architecture.md](architecture.md#what-failing-looks-like).
"""


_LEARNING = """
## Why a run does not learn

```sh
troupe why runs/my-run                 # or several; runs that go on, or have ended
```

prints a line for each of these that holds, the likeliest first: what, the figure, why it matters and the
field that helps; or `nothing found`. The last line of the panel is the first of them, by the newest values.
Whether returns have risen is judged by those of training: an agent that has learned its task may always do
the same.

| symptom | name | measured by | counts from | what helps |
|---|---|---|---|---|
"""

SHOWN = {
    "raw-pixels": "inputs",
    "huge-rewards": "reward-scale",
    "high-rate": "learning-rate, entropy, dead-units",
    "collapsed": "entropy",
    "dead": "learning-rate, dead-units, unexplained",
    "timed": "time-limit",
    "short-sighted": "discount",
    "stale": "stale",
    "at-bounds": "at-bounds",
    "tiny-replay": "small-replay",
    **dict.fromkeys(
        (
            *("healthy-ppo", "healthy-apex", "healthy-sac", "healthy-impala", "healthy-pqn"),
            *("healthy-catch", "healthy-delay", "healthy-swing"),
        ),
        "nothing found",
    ),
}
"""What `troupe why` says of the runs of tests/doctor/faults.py, by the name of the run."""

_PLANTED = """
Short trainings by the services, ten with one planted fault each and the others with none, and all that is
said of them (`python -m tests.doctor.faults` trains them anew). Their machine was busy, so that several were
stopped before their last step; `healthy-swing`, a seventh of the preset's steps, had not learned yet.

| run | said |
|---|---|
"""


def page() -> str:
    """Return docs/troubleshooting.md."""
    limits = _HEAD + "".join(map(_row, LIMITS)) + _TAIL
    learning = _LEARNING + "".join(map(_fault_row, FAULTS))
    return limits + learning + _PLANTED + "".join(f"| {name} | {said} |\n" for name, said in SHOWN.items())


def _row(limit: Limit) -> str:
    return f"| {limit.symptom} | {limit.name} | {_metrics(limit.metrics)} | {_advice(limit)} |\n"


def _fault_row(fault: Fault) -> str:
    metrics = _metrics(fault.metrics) or "the configuration"
    return f"| {fault.symptom} | {fault.name} | {metrics} | {fault.threshold} | {_advice(fault)} |\n"


def _metrics(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _advice(row: Limit | Fault) -> str:
    advice = re.sub(r"\{[^}]*\}", "N", row.page_advice or row.advice)
    value = r"N|\d+|lz4|none|bfloat16|true|sign|tanh_normal"
    return re.sub(rf"(--[a-z]+\.[a-z_]+( (?:{value}))?)", r"`\1`", advice)


if __name__ == "__main__":
    print(page(), end="")
