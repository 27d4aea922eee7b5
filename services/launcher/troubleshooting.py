"""docs/troubleshooting.md, from the table of findings.

`python -m troupe.services.launcher.troubleshooting` prints it.
"""

from __future__ import annotations

import re

from troupe.services.launcher.findings import LIMITS, Limit

_HEAD = """\
# What is wrong, or slow

<!-- Written by `make docs` from services/launcher/findings.py and troubleshooting.py: edit those. -->

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


def page() -> str:
    """Return docs/troubleshooting.md."""
    return _HEAD + "".join(map(_row, LIMITS)) + _TAIL


def _row(limit: Limit) -> str:
    metrics = ", ".join(f"`{metric}`" for metric in limit.metrics)
    advice = re.sub(r"\{[^}]*\}", "N", limit.page_advice or limit.advice)
    advice = re.sub(r"(--[a-z]+\.[a-z_]+( (?:N|\d+|lz4|none|bfloat16))?)", r"`\1`", advice)
    return f"| {limit.symptom} | {limit.name} | {metrics} | {advice} |\n"


if __name__ == "__main__":
    print(page(), end="")
