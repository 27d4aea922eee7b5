"""Write a README.md into every folder of this configuration: what it is for, its inputs, its outputs.

    python document.py [FOLDER]

All of it is in the .tf files: the comment at the head of main.tf, and the descriptions. `make docs` runs
this. The files are read as `terraform fmt` writes them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_BLOCK = re.compile(r'^(variable|output) "(\w+)" \{\n(.*?)^\}', re.MULTILINE | re.DOTALL)
_ATTRIBUTE = re.compile(r"^  (\w+) += (.*?)(?=^  \w|\Z)", re.MULTILINE | re.DOTALL)
_NOTE = "<!-- Made by `make docs` from the .tf files of this folder: edit those. -->\n"


def blocks(folder: Path, kind: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Name and attributes of every variable, or output, of a folder, in the order of its files."""
    for file in sorted(folder.glob("*.tf")):
        for found, name, body in _BLOCK.findall(file.read_text("utf-8")):
            if found == kind:
                attributes = {key: value.strip() for key, value in _ATTRIBUTE.findall(body)}
                if "description" not in attributes:
                    raise SystemExit(f'{file}: {kind} "{name}" has no description')
                yield name, attributes


def purpose(folder: Path) -> str:
    """The comment at the head of main.tf."""
    head = re.match(r"(?:#.*\n)+", (folder / "main.tf").read_text("utf-8"))
    if head is None:
        raise SystemExit(f"{folder / 'main.tf'} should begin with a comment that says what it is for")
    return head[0].replace("# ", "")


def readme(folder: Path, root: Path) -> str:
    """The whole page of a folder."""
    title = "Terraform configuration" if folder == root else folder.name
    text = f"{_NOTE}# {title}\n\n{purpose(folder)}"
    if folder == root:
        text += "\n[docs/aws.md](../../docs/aws.md) is the guide.\n"
        for part in ("modules", "examples"):
            text += f"\n## {part.capitalize()}\n\n| folder | purpose |\n|---|---|\n"
            for one in sorted(path.parent for path in (folder / part).glob("*/main.tf")):
                text += f"| [{one.name}]({part}/{one.name}/README.md) | {_cell(purpose(one))} |\n"
    inputs = list(blocks(folder, "variable"))
    text += "\n## Inputs\n\n| input | type | default | meaning |\n|---|---|---|---|\n" * bool(inputs)
    for name, said in inputs:
        default = f"`{_cell(said['default'])}`" if "default" in said else "required"
        text += f"| `{name}` | `{_cell(said.get('type', 'any'))}` | {default} | {_words(said)} |\n"
    outputs = list(blocks(folder, "output"))
    text += "\n## Outputs\n\n| output | meaning |\n|---|---|\n" * bool(outputs)
    for name, said in outputs:
        text += f"| `{name}` | {_words(said)} |\n"
    return text


def _words(said: dict[str, str]) -> str:
    return _cell(json.loads(said["description"]))


def _cell(text: str) -> str:
    """A text on one line, without comments; the fields of an object are divided by commas."""
    lines = [re.sub(r" +# .*", "", line).strip() for line in text.strip().splitlines()]
    line = re.sub(r"(\w\)?) (?=\w+ += )", r"\1, ", " ".join(lines)) if "object(" in text else " ".join(lines)
    return re.sub(r" += ", " = ", line).replace("|", "\\|")


def main(root: Path) -> None:
    """Write the page of every folder that has a main.tf."""
    for folder in [root, *sorted(file.parent for file in root.glob("*/*/main.tf"))]:
        (folder / "README.md").write_text(readme(folder, root), "utf-8")


if __name__ == "__main__":
    main(Path(*sys.argv[1:2]) if sys.argv[1:] else Path(__file__).parent)
