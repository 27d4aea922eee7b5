"""A service that only pretends: `python fake_service.py RUN_DIR NAME BEHAVIOUR RESTARTS [--resume]`."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

run_dir, name, behaviour, restarts = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])


def write_status(steps, note=""):
    updates = 0 if behaviour in ("idle", "dies-of-updates") else steps // 4
    metrics = {"speed/steps_per_s": 1000.0, "replay/items": float(steps), "learner/wait_share": 0.5}
    metrics["speed/updates_per_s"] = 10.0
    metrics |= {"eval/episode_return": 12.5, "eval/version": 4.0}
    status = {"steps": steps, "frames": steps, "updates": updates, "updates_since_start": updates}
    environments = {"episodes": 0 if behaviour == "endless" else steps // 20}
    text = json.dumps({**status, "metrics": metrics, "environments": environments, "note": note})
    temporary = run_dir / f".status.{os.getpid()}"
    temporary.write_text(text)
    temporary.replace(run_dir / "status.json")


def record_high_rate():
    from troupe.common.runtime.metrics import CSV_FILE, CSV_HEADER, Row

    values = {"learner/step_size": 0.5, "learner/learning_rate": 0.1}
    rows = [Row(1.0, 1000, 1000, 250, "learner", *item) for item in values.items()]
    text = "\n".join([CSV_HEADER, *(",".join(map(str, row)) for row in rows), ""])
    (run_dir / CSV_FILE).write_text(text)


def stop(*_):
    with (run_dir / "stopped.txt").open("a") as file:
        file.write(f"{name}\n")
    if name == "learner" and behaviour != "early":
        from troupe.common.runtime.checkpoint import save_checkpoint  # slow to import, and only wanted here

        save_checkpoint(run_dir / "checkpoints", {}, {"steps": 123})
    sys.exit(0)


def learner():
    if behaviour == "high-rate":
        record_high_rate()
    if behaviour == "bad-config":
        print("troupe: error: no such game: pongg; nearest: pong", file=sys.stderr)
        sys.exit(2)
    if restarts == 0 and behaviour in ("dies-of-updates", "dies-once"):
        write_status(1000)
        raise ValueError("clamp takes a number")
    if behaviour == "silent":
        time.sleep(600)  # longer than any test waits
    if behaviour == "slow-start":
        time.sleep(1.0)  # several lines of the log
    ending = ("finish", "endless", "high-rate", "idle", "dies-of-updates", "dies-once")
    steps, most = 0, 2000 if behaviour in ending or behaviour.startswith("slow-") else 1900
    while steps < 2000:
        steps = min(steps + 100, most)
        with contextlib.suppress(OSError):  # a full disk ends no learner
            write_status(steps)
        time.sleep(0.05)
    while behaviour == "run":
        with contextlib.suppress(OSError):  # the disk may be full
            write_status(steps)
        time.sleep(0.05)
    if behaviour == "slow-end":
        for _ in range(40):  # several lines of the log
            write_status(steps, "writing")
            time.sleep(0.05)


signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "deaf" else stop)
with (run_dir / "pids.txt").open("a") as file:
    file.write(f"{os.getpid()} {name}\n")
print("up", restarts, sys.argv[5:], flush=True)
if name == "learner":
    learner()
elif name == "actor-1" and behaviour == "crash" and restarts < 2:
    raise RuntimeError("emulator exploded")
else:
    time.sleep(600)  # longer than any test waits
