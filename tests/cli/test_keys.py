"""`troupe keys`, and what the services make of `--keys` and `--insecure`."""

from __future__ import annotations

import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import troupe.services.__main__ as cli
from troupe.common.config import load_config, to_toml
from troupe.services.launcher import make_keys


def test_new_makes_a_complete_private_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert cli.main(["keys", "new", str(folder)]) == 0
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert cli.main(["keys", "check", str(folder)]) == 0
    stdout, stderr = capsys.readouterr()
    assert str(folder) in stdout
    assert stderr == ""
    secrets = [path.read_text().strip() for path in folder.glob("*.secret")]
    assert not any(secret in stdout for secret in secrets)


def test_new_never_replaces_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "keys")
    assert cli.main(["keys", "new", folder]) == 0
    before = (tmp_path / "keys" / "learner.secret").read_text()
    assert cli.main(["keys", "new", folder]) == 2
    assert "holds keys already" in capsys.readouterr().err
    assert cli.main(["keys", "new", folder, "--if-missing"]) == 0
    assert (tmp_path / "keys" / "learner.secret").read_text() == before
    (tmp_path / "keys" / "actor.secret").unlink()
    assert cli.main(["keys", "new", folder, "--if-missing"]) == 4


def test_if_missing_takes_the_keys_that_another_one_makes_at_the_same_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(4) as threads:
        codes = list(threads.map(make_keys.new, [[str(tmp_path / "keys"), "--if-missing"]] * 4))
    assert codes == [0] * 4
    assert capsys.readouterr().out.count("made keys for") == 1
    assert cli.main(["keys", "check", str(tmp_path / "keys")]) == 0


def test_a_file_that_others_may_read_is_exit_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert cli.main(["keys", "new", str(folder)]) == 0
    (folder / "replay.secret").chmod(0o644)
    capsys.readouterr()
    assert cli.main(["keys", "check", str(folder), "--role", "actor"]) == 0
    assert cli.main(["keys", "check", str(folder)]) == 4
    stderr = capsys.readouterr().err
    assert stderr.startswith("troupe: error: ")
    assert stderr.count("\n") == 1
    assert "chmod 600" in stderr


@pytest.mark.parametrize("line", ["keys", "keys old DIR", "keys new", "keys check DIR --role king"])
def test_wrong_words_are_exit_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_launcher_hands_its_keys_to_every_service(tmp_path: Path) -> None:
    from troupe.services.launcher.processes import child_specs
    from troupe.services.launcher.workspace import TensorBoardPort

    config = load_config("cartpole-apex", None, {"keys": "some/keys"}, {})
    assert config.net.keys_dir == "some/keys"
    for spec in child_specs(config, tmp_path, tmp_path, TensorBoardPort(6006), resume=False):
        words = list(spec.command(0))
        assert ("some/keys" in words) == (spec.name != "tensorboard")


def learner(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start a learner in vain: its announce address is none that this machine has."""
    import os

    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(to_toml(load_config("cartpole-apex")))
    words = [
        sys.executable,
        "-m",
        "troupe.services.learner",
        "--run-dir",
        str(folder),
        "--log-level",
        "error",
    ]
    words += ["--control", "tcp://0.0.0.0:45550", "--announce", "tcp://192.0.2.1:45551"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*words, *options], capture_output=True, text=True, timeout=240, env=env)


@pytest.mark.slow
def test_the_learner_binds_other_addresses_with_keys_or_on_request_only(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    assert cli.main(["keys", "new", keys]) == 0
    refused = learner(tmp_path / "R")
    assert refused.returncode == 2
    assert "will not bind tcp://0.0.0.0:45550 without keys" in refused.stderr
    # What binds then is the first socket; the second fails for want of such an address, in one line too.
    for options, environment in (
        (["--insecure"], {}),
        ([], {"TROUPE_NET__KEYS_DIR": keys}),
    ):
        bound = learner(tmp_path / "R", *options, **environment)
        assert bound.returncode == 2
        assert "cannot bind tcp://192.0.2.1:45551" in bound.stderr.splitlines()[-1]
    assert learner(tmp_path / "R", "--keys", str(tmp_path / "nowhere")).returncode == 4
