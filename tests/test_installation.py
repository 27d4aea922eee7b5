import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import troupe
from troupe.common import installation

ROOT = Path(__file__).parents[1]


def texts():
    """What a user reads or runs."""
    yield from (path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".txt"))
    for folder in ("common", "services", "deploy", "docs"):
        yield from (
            path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".sh", ".hcl")
        )


def test_the_distribution_is_the_one_that_is_built():
    """PyPI's `troupe` is another project: nothing here may make anybody install it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == installation.DISTRIBUTION
    needs = [need for extra in project["optional-dependencies"].values() for need in extra]
    assert all(need.startswith(installation.DISTRIBUTION) for need in needs if need.startswith("troupe"))
    wrong = [
        path for path in texts() if re.search(r"(?<![/\\w])troupe\[\w", path.read_text("utf-8", "ignore"))
    ]
    assert not wrong


def test_the_package_has_the_version_of_the_installed_distribution():
    version = importlib.metadata.version(installation.DISTRIBUTION)
    assert troupe.__version__ == version
    assert "__version__" in dir(troupe)


def test_in_a_checkout_an_extra_comes_from_the_checkout(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert installation.install_command("actor") == "pip install -c constraints.txt -e '.[actor]'"
    monkeypatch.chdir(tmp_path)
    told = installation.install_command("actor")
    assert told == f"pip install -c {ROOT / 'constraints.txt'} -e '{ROOT}[actor]'"


def test_without_a_checkout_it_comes_from_the_index(tmp_path):
    package = tmp_path / "troupe" / "common"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    for name in ("installation.py", "errors.py"):
        shutil.copy(ROOT / "common" / name, package)
    code = "from troupe.common.installation import *; print(install_command('learner,actor'))"
    env = {"PYTHONPATH": str(tmp_path)}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert told.stdout == "pip install 'troupe-rl[learner,actor]'\n", told.stderr


def test_a_clone_s_folder_does_not_hide_the_package(tmp_path):
    """`git clone .../troupe` makes a folder of the package's name: a script beside it means the package."""
    (tmp_path / "troupe").mkdir()
    code = "import troupe; print(troupe.train.__name__)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert told.stdout == "train\n", told.stderr


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("docker", "TROUPE_EXTRAS=minatar docker compose build"),
        ("packer", "packer build -var 'extras=[\"minatar\"]'"),
    ],
)
def test_in_an_image_the_advice_is_to_build_another(tmp_path, monkeypatch, kind, told):
    (tmp_path / "troupe-image").write_text(f"{kind}\n")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert told in installation.install_command("minatar")


def _extras() -> dict[str, list[str]]:
    """What each extra needs, other extras resolved."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def needs(name: str) -> list[str]:
        own = []
        for need in extras[name]:
            inner = re.fullmatch(rf"{installation.DISTRIBUTION}\[(.+)\]", need)
            own += [each for other in inner[1].split(",") for each in needs(other)] if inner else [need]
        return own

    return {name: needs(name) for name in extras}


EXTRAS = _extras()
APART = sorted(name for name, needs in EXTRAS.items() if not set(needs) <= set(EXTRAS["dev"]))


def test_the_extras_that_no_other_test_installs_are_known():
    assert APART == ["envpool", "gpu", "mlflow", "s3", "trackio", "wandb"]


def test_every_extra_can_be_installed_with_the_pins():
    """All at once, which pip takes no longer for than for one. Those of `dev` these tests run with."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    needs = sorted({need for extra in APART for need in EXTRAS[extra]})
    done = subprocess.run(
        [*pip, "-c", str(ROOT / "constraints.txt"), *needs],
        capture_output=True,
        text=True,
        timeout=280,
    )
    if "No matching distribution" in done.stderr and "conflict" not in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-2000:]


def test_one_version_stands_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [version]


def test_what_the_workflows_run_exists():
    """Nothing here runs them: what they call has to be there, and rights are given job by job."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert [path.stem for path in workflows] == ["release", "test"]
    for path in workflows:
        text = path.read_text()
        assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE), path.name
        called = re.findall(r"- run: (?:make ([a-z-]+)|(\.ci/run))", text)
        assert called, path.name
        assert {make for make, _ in called if make} <= targets
        named = re.findall(r"(?<=[ \"])(tests/[\w/.]+)", text)
        assert [name for name in named if not (ROOT / name).exists()] == []
