"""Run directories as a learner leaves them, made by hand: what reads runs cannot tell the difference."""

import json

from troupe.common.config import load_config, to_toml
from troupe.common.runtime.files import write_status
from troupe.common.runtime.metrics import CSV_HEADER


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
