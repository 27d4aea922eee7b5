"""Runs the launcher with stand-ins for the services: `python fake_launch.py RUN_DIR BEHAVIOUR [panel]`."""

import sys
from pathlib import Path

from troupe.common.config import config_from_dict
from troupe.common.runtime import run_main
from troupe.services.launcher import findings, launcher
from troupe.services.launcher.supervisor import ChildSpec

SERVICE = Path(__file__).with_name("fake_service.py")
TOTAL_STEPS = 2000


def child_specs(config, run_dir, sockets, tensorboard, board, *, resume):
    """As many processes as a real run has, under the same names."""
    (run_dir / "sockets.txt").write_text(str(sockets))

    def spec(name, **options):
        def command(restarts):
            words = [sys.executable, str(SERVICE), str(run_dir), name, sys.argv[2], str(restarts)]
            return [*words, "--resume"] if resume else words

        return ChildSpec(name, command, run_dir / "logs" / f"{name}.log", **options)

    names = ["learner", "replay", "actor-0", "actor-1"]
    return [*(spec(name) for name in names), spec("evaluator", essential=False)]


if __name__ == "__main__":
    launcher.child_specs = child_specs
    launcher._LEARNER_STOP_S = launcher._OTHERS_STOP_S = 100.0  # a busy machine needs more than a run
    launcher._PANEL_PERIOD_S = 0.1  # several looks at a run of a second
    findings._SETTLED_S = 2.0  # nothing gets warm here
    values = {
        "run": {"total_steps": TOTAL_STEPS, "log_every_s": 0.2},
        "env": {"id": "gym:CartPole-v1"},
        "net": {"tensorboard_port": 0},
    }
    config = config_from_dict(values, typed_agent=False)  # to know the algorithm would import torch
    run_dir, panel = Path(sys.argv[1]), "panel" in sys.argv
    resume = (run_dir / "config.toml").exists()
    sys.exit(run_main(lambda: launcher.run(config, run_dir, resume=resume, progress=panel)))
