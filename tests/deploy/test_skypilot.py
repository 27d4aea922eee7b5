"""deploy/skypilot: SkyPilot itself reads the file; what its machines run is run, in one network namespace."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.deploy.conftest import ROOT, run
from tests.harness import end_tree
from troupe.common.runtime.files import read_status
from troupe.common.wire.security.keys import make_keys

FOLDER = ROOT / "deploy" / "skypilot"
KEYS_OF_ACTORS = ["actor.secret", "learner.public", "replay.public"]
# Its own reader checks every task against its schema.
READ = """
import json, sys
from sky.utils import dag_utils
dag = dag_utils.load_job_group_from_yaml(sys.argv[1], secrets_overrides=[("TROUPE_KEY_SET", "x")])
said = {t.name: [t.num_nodes, [r.use_spot for r in t.resources], t.run] for t in dag.tasks}
print(json.dumps({"primary": dag.primary_tasks, "tasks": said}))
"""


@pytest.fixture(scope="module")
def sky_python() -> str:
    """A Python with SkyPilot, whose pins fit those of nothing else here."""
    python = os.environ.get("TROUPE_SKYPILOT_PYTHON", "")
    if not python:
        pytest.skip(
            "NOT TESTED: SkyPilot: python3 -m venv V && V/bin/pip install skypilot==0.14.1, then "
            "TROUPE_SKYPILOT_PYTHON=V/bin/python"
        )
    return python


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_skypilot_reads_it(sky_python: str, tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    said = json.loads(
        run(sky_python, "-c", READ, FOLDER / "run.yaml", cwd=ROOT, env=env).strip().splitlines()[-1]
    )
    assert said["primary"] == ["learner"]
    assert said["tasks"] == {
        "learner": [1, [False], "bash deploy/skypilot/start.sh learner"],
        "actors": [4, [True], "bash deploy/skypilot/start.sh actors"],
    }
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((FOLDER / "run.yaml").read_text().replace("num_nodes", "number_of_nodes"))
    run(sky_python, "-c", READ, wrong, cwd=ROOT, env=env, ok=(1,))


def test_bash_finds_no_mistake() -> None:
    subprocess.run(["bash", "-n", FOLDER / "start.sh"], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", FOLDER / "start.sh"], check=True)


def _home(folder: Path) -> Path:
    """The home directory of a machine on which `setup` has been."""
    (folder / "troupe" / "bin").mkdir(parents=True)
    (folder / "troupe" / "bin" / "troupe").symlink_to(Path(sys.executable).with_name("troupe"))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_ends_on_both_kinds_of_machines(tmp_path: Path) -> None:
    """The machine of the learner and one of actors, in a network of their own."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("rsync"):
        pytest.skip("NOT TESTED: a network of one's own needs root, unshare and rsync")
    make_keys(tmp_path / "keys")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(tmp_path / "keys", arcname=".")
    bucket = tmp_path / "bucket"
    own = {name: text for name, text in os.environ.items() if not name.startswith("TROUPE_")}
    common = own | {
        "TROUPE_KEY_SET": base64.b64encode(packed.getvalue()).decode(),
        "TROUPE_LEARNER_HOST": "localhost",
        "TROUPE_BUCKET": str(bucket),
        "TROUPE_RUN_FILE": "cartpole-apex",
        "TROUPE_RUN__TOTAL_STEPS": "1500",
        "TROUPE_ACTORS": "2",
        "TROUPE_ACTOR__TOTAL_SLOTS": "64",
    }
    learner, actors = (_home(tmp_path / role) for role in ("learner", "actors"))
    script = f"""ip link set lo up
        HOME={learner} bash deploy/skypilot/start.sh learner & learner=$!
        HOME={actors} bash deploy/skypilot/start.sh actors & wait $learner"""
    with (tmp_path / "log").open("w") as log:
        words = ["unshare", "-n", "bash", "-c", script]
        both = subprocess.Popen(words, cwd=ROOT, env=common, stdout=log, stderr=log, start_new_session=True)
    try:
        assert both.wait(1500) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        end_tree(both)
    assert read_status(bucket / "run")["steps"] >= 1500
    assert not (bucket / "run" / "replay").exists()
    assert {path.stat().st_mode & 0o777 for path in (learner / "keys").iterdir()} == {0o600}
    assert sorted(path.name for path in (actors / "keys").iterdir()) == KEYS_OF_ACTORS


def test_a_machine_of_actors_keeps_no_key_but_theirs(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    packed = subprocess.run(["tar", "-C", tmp_path / "keys", "-c", "."], capture_output=True, check=True)
    env = os.environ | {
        "HOME": str(tmp_path / "home"),
        "TROUPE_KEY_SET": base64.b64encode(packed.stdout).decode(),
        "TROUPE_ACTORS": "0",
    }
    subprocess.run(["bash", FOLDER / "start.sh", "actors"], env=env, check=True, timeout=60)
    kept = tmp_path / "home" / "keys"
    assert sorted(path.name for path in kept.iterdir()) == KEYS_OF_ACTORS
    assert {path.stat().st_mode & 0o777 for path in kept.iterdir()} == {0o600}
