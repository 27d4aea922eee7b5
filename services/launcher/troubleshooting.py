"""docs/troubleshooting.md, from the table of findings.

`python -m troupe.services.launcher.troubleshooting` prints it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from troupe.services.launcher.findings import LIMITS, Limit
from troupe.services.launcher.learning import FAULTS, Fault

_HEAD = """\
# Troubleshooting: what is wrong, slow, or does not learn

<!-- Written by `make docs` from findings.py, learning.py, troubleshooting.py in services/launcher. -->

```sh
troupe doctor                          # check this machine
troupe doctor runs/my-run              # and a run directory
troupe why runs/my-run                 # why a run does not learn
```

For a run on other machines, `troupe doctor tcp://learner:5550` asks its learner; `--keys DIR` names a
directory with the keys of a viewer.

`troupe doctor` prints one line per check: the subject, the figure, and `ok`, `note` or `wrong` with the fix.
The exit code is 0 if nothing is wrong, otherwise 7. `--json` prints the same for programs.

| area | checks |
|---|---|
| versions, clocks | of this machine and of a run's members; clocks may differ by up to a second |
| ports | whether `net.control`, `net.announce`, `net.replay` and others are free, and who has them |
| keys | files, their modes, the allow-list, and with an address whether they are accepted there |
| limits | open files, locked memory, memory and cores of this user or container, shared memory |
| disk | forced writes, measured for a second; room for checkpoints and for replay at its full size |
| processor, threads, gpu | bfloat16 and vector units, threads of numeric libraries, devices of torch |
| packages | packages that each family of environments needs, and extras |
| run | the last error of each log, hashes of the newest checkpoints, replay's files, failed writes |
| members | which members have been silent for a while, and the problems that each has reported |
| limits of the run | findings of [the next section](#what-limits-a-run), the worst first |
| learning | findings of [the section after it](#why-a-run-does-not-learn), the likeliest first |

## What limits a run

The panel and the log lines of `troupe train` name the limit that costs the largest share of the run's time.
The last rows are the least specific and appear only if no other row explains as much.
[Metrics](metrics.md) describes the figures.

| symptom | name | measured by | what helps |
|---|---|---|---|
"""

_TAIL = """
To change a field of a run, stop it and give the field to `troupe resume RUN` as an option. Structural fields,
such as `replay.compression` and `replay.capacity_items`, can only change in a new run:
`troupe config explain FIELD` says which a field is. See also
[what services print while they wait](services.md#what-they-print), and
[what each failure looks like](architecture.md#what-failing-looks-like).
"""


_LEARNING = """
## Why a run does not learn

```sh
troupe why runs/my-run                 # or several runs, running or ended
```

This prints one line per problem found, the likeliest first: the problem, the figure, why it matters and the
field that helps. If there is none, it prints `nothing found`. The last line of the live panel shows the
first of them, judged by the newest values. Several apply only if returns have not risen, because an agent
that has learned its task may rightly always do the same; that is judged by training episodes. For how to
change a field, see [above](#what-limits-a-run).

| symptom | name | measured by | threshold | what helps |
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
"""What `troupe why` says about the runs of tests/doctor/faults.py, by the name of the run."""

_PLANTED = """
This was tested with short runs of the services: ten with one planted fault each, the others with none.
The table shows everything `troupe why` says about them (`python -m tests.doctor.faults` repeats them; its
source lists what each changes). Their machine was busy, so several were stopped before their last step:
`healthy-swing` after a seventh of the steps of `pendulum-ppo`, before it had learned.

| run | `troupe why` says |
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
