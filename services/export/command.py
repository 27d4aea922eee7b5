"""`troupe export`: what a run has learned, as a file for other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troupe.common.config import Config
from troupe.common.errors import ConfigError
from troupe.common.installation import install_command
from troupe.common.permits import add_module_argument
from troupe.common.runtime.checkpoint import Checkpoint, open_checkpoint, save_checkpoint
from troupe.common.runtime.files import readable, write_output
from troupe.common.runtime.logging import warnings_shown
from troupe.common.runtime.parser import Parser, integer

if TYPE_CHECKING:
    import torch

    from troupe.common.agents import Agent
    from troupe.services.export.acting import Acting

FORMATS = ("onnx", "safetensors", "torchscript")
"""Those of `troupe.services.export.formats`, which needs torch."""
CHECKPOINT = "checkpoint"
"""The format that is no file for other programs: a checkpoint that only acts."""


def main_parser() -> Parser:
    """Return the parser of `troupe export`."""
    parser = Parser(
        prog="troupe export",
        description="Write the policy of a run's newest checkpoint, or of a given one, to a file for "
        "other programs: its deterministic decision, with the statistics of its inputs. A recurrent state "
        "is an input and an output.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="run directory, or checkpoint")
    parser.add_argument(
        "--format",
        required=True,
        choices=sorted([*FORMATS, CHECKPOINT]),
        help="safetensors: only the weights; checkpoint: a directory with only what `troupe eval` needs",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="file to write; with --format checkpoint, a new directory",
    )
    parser.add_argument(
        "--slots",
        type=integer(1, 4096),
        default=1,
        metavar="N",
        help="environments per call; fixed in the file (default: 1)",
    )
    add_module_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the file's description as one JSON line")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the file; returns the exit code."""
    import torch

    from troupe.common.policies import agent_of, config_of, spec_of

    arguments = main_parser().parse_args(argv)
    with warnings_shown("troupe.common.runtime.checkpoint"):
        checkpoint = open_checkpoint(arguments.path)
    torch.set_num_threads(1)
    # The environment is never made, so its module needs no permission; the algorithm's does.
    config = config_of(checkpoint, arguments.modules, plays=False)
    agent = agent_of(checkpoint, config, spec_of(checkpoint))
    description = export(agent, config, checkpoint, arguments.format, arguments.out, arguments.slots)
    print(json.dumps(description) if arguments.json else table(description, arguments.out))
    return 0


def export(
    agent: Agent, config: Config, checkpoint: Checkpoint, form: str, out: Path, slots: int = 1
) -> dict[str, Any]:
    """Write the agent of a checkpoint to `out` in a format; returns the description in it.

    Raises:
        ConfigError: its network cannot be written so, a package is missing, or the file cannot be written.
    """
    from torch.onnx.errors import OnnxExporterError

    from troupe.services.export.acting import Acting
    from troupe.services.export.formats import WRITERS

    acting = Acting(agent, slots).eval()
    description = describe(acting, agent, config, checkpoint)
    if form == CHECKPOINT:
        _write_checkpoint(agent, config, checkpoint, out)
        return description
    try:
        data = WRITERS[form](acting, agent, json.dumps(description))
    except ImportError as error:
        message = f"--format {form} needs the package {error.name}: {install_command('export')}"
        raise ConfigError(message) from None
    # What exporters raise for a network that they cannot express. Anything else is a defect, and keeps its
    # traceback.
    except (RuntimeError, ValueError, OnnxExporterError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"this network cannot be written as {form}: {reason}") from error
    write_output(out, data)
    return description


def _write_checkpoint(agent: Agent, config: Config, checkpoint: Checkpoint, out: Path) -> None:
    """Network, configuration and counters as a directory with one checkpoint, without what learning needs."""
    with readable(out):
        # `prune` would otherwise take what is there for older checkpoints.
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} already exists: name a new directory, or remove it first")
    arrays = {f"net/{name}": array for name, array in agent.params().items()}
    names = ("steps", "updates", "agent", "troupe")
    known = {name: checkpoint.meta[name] for name in names if name in checkpoint.meta}
    save_checkpoint(out, arrays, {**known, "config": config.to_dict(), "spec": asdict(agent.spec)})


def describe(acting: Acting, agent: Agent, config: Config, checkpoint: Checkpoint) -> dict[str, Any]:
    """What somebody needs to know to use the file: JSON values."""
    import torch

    with torch.inference_mode():
        results = dict(zip(acting.outputs, acting(*acting.inputs.values()), strict=True))
    meta = checkpoint.meta
    return {
        "algorithm": config.agent.algorithm,
        "env": config.env.model_dump(mode="json"),
        "spec": asdict(agent.spec),
        "inputs": {name: _shape(tensor) for name, tensor in acting.inputs.items()},
        "outputs": {name: _shape(tensor) for name, tensor in results.items()},
        "steps": int(meta.get("steps", 0)),
        "updates": int(meta.get("updates", 0)),
        "troupe": meta.get("troupe", {}),
    }


def table(description: dict[str, Any], out: Path) -> str:
    """Write a description for people."""
    rows = [f"{out}: {description['algorithm']} after {description['steps']:,} steps"]
    for way in ("inputs", "outputs"):
        rows += [
            f"  {way[:-1]:<7}{name:<14}{each['dtype']} {each['shape']}"
            for name, each in description[way].items()
        ]
    return "\n".join(rows)


def _shape(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
