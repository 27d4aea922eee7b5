"""Write a README.md into every folder of this configuration: what it is for, its inputs, its outputs.

    python document.py [FOLDER]

All of it is in the .tf files: the comment at the head of main.tf, and the descriptions. `make docs` runs
this. The files are read as `terraform fmt` writes them.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

_BLOCK = re.compile(r'^(variable|output) "(\w+)" \{\n(.*?)^\}', re.MULTILINE | re.DOTALL)
_ATTRIBUTE = re.compile(r"^  (\w+) += (.*?)(?=^  \w|\Z)", re.MULTILINE | re.DOTALL)
_NOTE = "<!-- Made by `make docs` from the .tf files of this folder: edit those. -->\n"

# Of the root alone. No link leads out of the folder, which the registry has in a repository of its own.
_USE = """
The guide is `docs/aws.md` in Troupe's repository: images, keys, prices, and how a run ends. In a clone, use
this folder as it is. From a configuration of your own, name it as a module:

```hcl
provider "aws" {
  region = "us-east-1"
}

module "troupe" {
  source  = "NAMESPACE/troupe/aws"
  version = "VERSION" # the version of Troupe in your images

  run                   = "cartpole"
  preset                = "cartpole-apex"
  keys_dir              = "keys/cartpole"         # made by `troupe keys new keys/cartpole`
  cpu_image_id          = "ami-0123456789abcdef0" # made by Packer
  learner_device        = "cpu"
  learner_instance_type = "c6i.large"
}

output "troupe" {
  value = module.troupe
}
```

`NAMESPACE` is the owner in the registry. Without the registry, `source` is the address of a Git repository,
and there is no `version`: `git::https://HOST/OWNER/troupe.git//deploy/terraform?ref=vVERSION`. The examples
name this folder as `../..`; in a copy of an example, replace that by one of these addresses.

## Publishing

The Terraform registry takes a module from a public GitHub repository named `terraform-aws-troupe`. Its root
is this folder, and each tag is a version. In a clone of Troupe, at the commit of the release:

<!-- not run: an account at GitHub -->
```sh
git subtree split --prefix deploy/terraform --branch terraform-aws-troupe
module=git@github.com:NAMESPACE/terraform-aws-troupe.git
git push "$module" terraform-aws-troupe:main terraform-aws-troupe:refs/tags/vVERSION
```

The first time, create the empty repository before. Afterwards, choose it at <https://registry.terraform.io>
(*Publish*, *Module*). From then on, the registry finds new tags by itself. A private registry takes the same
repository.
"""


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
    title = "Terraform module" if folder == root else folder.name
    text = f"{_NOTE}# {title}\n\n{purpose(folder)}"
    if folder == root:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
        text += _USE.replace("VERSION", project["version"])
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
