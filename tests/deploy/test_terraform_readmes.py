"""The READMEs of the Terraform modules say what the .tf files say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.conftest import ROOT, TERRAFORM

FOLDERS = [TERRAFORM, *sorted(file.parent for file in TERRAFORM.glob("*/*/main.tf"))]
NAMES = [str(folder.relative_to(TERRAFORM)) for folder in FOLDERS]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The configuration, to change."""
    ignore = shutil.ignore_patterns(".terraform*", "*.tfstate*", "*.tfvars*", "README.md")
    return Path(shutil.copytree(TERRAFORM, tmp_path / "terraform", ignore=ignore))


def document(folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(TERRAFORM / "document.py"), str(folder)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def test_every_readme_is_current(copy: Path) -> None:
    done = document(copy)
    assert done.returncode == 0, done.stderr
    stale = [
        name
        for name in NAMES
        if not (TERRAFORM / name / "README.md").exists()
        or (TERRAFORM / name / "README.md").read_text() != (copy / name / "README.md").read_text()
    ]
    assert not stale, "run `make docs`"


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_every_input_and_output_has_its_row(folder: Path) -> None:
    text = "".join(file.read_text() for file in sorted(folder.glob("*.tf")))
    declared = re.findall(r'^\s*(?:variable|output)\s+"(\w+)"', text, re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)` \|.*\S \|$", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(declared)


def test_types_defaults_and_requirement_are_told(copy: Path) -> None:
    (copy / "modules" / "artifacts" / "variables.tf").write_text(
        'variable "one" {\n  description = "Say \\"a|b\\"."\n'
        "  type = object({\n    x = string # of it\n    y = map(number)\n  })\n}\n\n"
        'variable "two" {\n  description = "Many."\n  type        = list(string)\n  default     = ["a"]\n\n'
        '  validation {\n    condition     = true\n    error_message = "no"\n  }\n}\n'
    )
    assert document(copy).returncode == 0
    text = (copy / "modules" / "artifacts" / "README.md").read_text()
    assert '\n| `one` | `object({ x = string, y = map(number) })` | required | Say "a\\|b". |\n' in text
    assert '\n| `two` | `list(string)` | `["a"]` | Many. |\n' in text


def test_an_input_without_a_description_is_one_line(copy: Path) -> None:
    file = copy / "modules" / "artifacts" / "variables.tf"
    file.write_text('variable "one" {\n  type = string\n}\n')
    done = document(copy)
    assert done.returncode == 1
    assert done.stderr == f'{file}: variable "one" has no description\n'


def test_the_folder_can_be_a_repository_of_its_own() -> None:
    """As the registry takes it: with a license, and with nothing that leads out of the folder."""
    assert (TERRAFORM / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    for folder in FOLDERS:
        files = {file.name for file in folder.iterdir()}
        assert {"main.tf", "versions.tf", "README.md"} <= files
        assert {"variables.tf", "outputs.tf"} <= files or folder.parent.name == "examples"
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (folder / "README.md").read_text())
        text = "".join(file.read_text() for file in sorted(folder.glob("*.tf")))
        for name in [*links, *re.findall(r'source += "(\.[^"]*)"', text)]:
            assert (folder / name).resolve().is_relative_to(TERRAFORM), f"{folder}: {name}"
            assert (folder / name).exists(), f"{folder}: {name}"


def test_the_module_block_asks_for_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    text = (TERRAFORM / "README.md").read_text()
    assert set(re.findall(r'version = "([^"]+)"|/?v(\d[\d.]*\d)', text)) == {(version, ""), ("", version)}


def test_conditions_for_all_values_need_their_key() -> None:
    """`ForAllValues` alone lets through a request that lacks the key."""
    for file in TERRAFORM.rglob("*.tf"):
        tests = re.findall(r'test += "([^"]+)"\s+variable += "([^"]+)"\s+values += (.*)', file.read_text())
        needed = {key for test, key, _ in tests if test.startswith("ForAllValues:")}
        assert needed <= {key for test, key, values in tests if (test, values) == ("Null", '["false"]')}, file


def test_delete_markers_expire() -> None:
    text = (TERRAFORM / "modules" / "artifacts" / "main.tf").read_text()
    assert re.search(r"expired_object_delete_marker += true", text)
