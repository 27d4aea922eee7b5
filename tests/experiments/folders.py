"""Run directories as a learner leaves them, made by hand: what reads runs cannot tell the difference."""

import json
from itertools import zip_longest

from troupe.common.config import load_config, to_toml
from troupe.common.runtime import StopSignal
from troupe.common.runtime.files import write_status
from troupe.common.runtime.metrics import CSV_HEADER
from troupe.services.experiments.plan import parse
from troupe.services.experiments.sweep import Runner


def make_run(folder, preset="cartpole-ppo", returns=((100, 1.0), (200, 2.0)), steps=None, **fields):
    """A run with these evaluations, `(steps, return)`; `steps` made so far: by default all."""
    fields = {name.replace("__", "."): value for name, value in fields.items()}
    config = load_config(preset, None, fields)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    rows = [CSV_HEADER]
    for at, value in returns:
        rows.append(f"{at / 10},{at},{at},1,learner,speed/steps_per_s,9")
        rows.append(f"{at / 10},{at},{at},1,evaluator,eval/episode_return,{value}")
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    steps = config.run.total_steps if steps is None else steps
    metrics = {"eval/episode_return": returns[-1][1]} if returns else {}
    write_status(folder, {"steps": steps, "wall_s": 60.0, "metrics": metrics})
    return folder


def told(capsys):
    """What was printed, as JSON."""
    return json.loads(capsys.readouterr().out)


def make_sweep(folder, section, score_of, states=()):
    """A sweep's directory as its runner leaves it, with a run for each of its runs that has a score.

    `score_of` gives what a run is worth by its fields; `states` of the first runs: the others are done.
    """
    tables = {"sweep": {"preset": "cartpole-ppo", **section}}
    sweep = parse("lr.toml", tables, {})
    folder.mkdir(parents=True)
    runner = Runner(sweep, folder, StopSignal(), {run.name: 1000 for run in sweep.runs()})
    for job, state in zip_longest(runner.jobs, states, fillvalue="done"):
        job.state = state
        if state not in ("waiting", "failed"):
            fields = {name.replace(".", "__"): value for name, value in job.planned.fields.items()}
            make_run(job.run_dir, returns=[(1000, score_of(job.planned.fields))], **fields)
        job.error = "out of memory" if state == "failed" else ""
    runner.save()
    return folder
