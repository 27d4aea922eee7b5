"""`certificate.json` of a run: what its weights were, update by update, and where they were computed."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from troupe.common import installation
from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.machine import usable_cores
from troupe.common.runtime.files import CERTIFICATE_FILE, MAX_JSON_BYTES, atomic_write, check_regular
from troupe.common.runtime.logging import peer_text

FORMAT = 1
_FEATURES = ("avx", "amx", "fma", "sse4", "f16c", "neon", "asimd", "sve", "bf16", "i8mm")
"""What the names of processor features begin with on which arithmetic libraries choose their code."""


@dataclass(frozen=True)
class Weights:
    """The weights after an update: sha256 of each tensor, of its dtype, shape and bytes, by name."""

    update: int
    steps: int
    tensors: dict[str, str]

    def first_difference(self, other: Weights) -> str:
        """Name the first tensor that is otherwise in `other`, or lacks in one of them; empty if none is."""
        names = [*self.tensors, *(name for name in other.tensors if name not in self.tensors)]
        return next((n for n in names if self.tensors.get(n) != other.tensors.get(n)), "")


@dataclass
class Certificate:
    """What `certificate.json` holds.

    Attributes:
        made_with: versions, processor and settings, by name; see `circumstances`.
        weights: by update, ascending.
        changed: fields of the configuration that had another value before the run was resumed.
    """

    made_with: dict[str, Any]
    weights: dict[int, Weights] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    def add(self, update: int, steps: int, params: Mapping[str, np.ndarray]) -> Weights:
        """Hash the weights after an update."""
        found = Weights(update, steps, {name: _sha256(array) for name, array in params.items()})
        self.weights[update] = found
        return found

    def cut(self, update: int) -> None:
        """Forget what came after an update."""
        self.weights = {number: each for number, each in self.weights.items() if number <= update}

    def write(self, run_dir: Path) -> None:
        """Write it into the run."""
        lines = [
            json.dumps({"update": each.update, "steps": each.steps, "sha256": each.tensors})
            for each in self.weights.values()
        ]
        head = f'{{"format": {FORMAT},\n"made_with": {json.dumps(self.made_with, indent=1)},\n'
        head += f'"changed": {json.dumps(self.changed)},\n"weights": [\n'
        try:
            atomic_write(run_dir / CERTIFICATE_FILE, (head + ",\n".join(lines) + "\n]}\n").encode())
        except OSError as error:
            raise CheckpointError(f"cannot write {run_dir / CERTIFICATE_FILE}: {error.strerror}") from error

    @classmethod
    def read(cls, run_dir: Path) -> Certificate:
        """Read that of a run.

        Raises:
            ConfigError: it has none.
            CheckpointError: it is damaged.
        """
        path = run_dir / CERTIFICATE_FILE
        try:
            found = json.loads(check_regular(path, 16 * MAX_JSON_BYTES).read_bytes())
            if found["format"] != FORMAT:
                told = peer_text(str(found["format"]))
                raise CheckpointError(f"{path} has format {told}; this version reads {FORMAT}")
            weights = [
                Weights(
                    int(each["update"]),
                    int(each["steps"]),
                    {peer_text(str(k)): str(v) for k, v in each["sha256"].items()},
                )
                for each in found["weights"]
            ]
            updates = [0, *(each.update for each in weights)]
            if any(later <= former for former, later in itertools.pairwise(updates)):
                raise ValueError("its updates do not ascend from 1")
            made_with = {str(name): _told(value) for name, value in found["made_with"].items()}
            changed = [peer_text(str(each)) for each in found.get("changed", [])]
            return cls(made_with, {each.update: each for each in weights}, changed)
        except FileNotFoundError:
            raise ConfigError(
                f"{run_dir} has no {CERTIFICATE_FILE}: only runs of `troupe train --deterministic` have one"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged: {peer_text(str(error))[:200]}; remove it, and `troupe resume` begins "
                "another one"
            ) from None


def _told(value: Any) -> Any:
    """A value of `made_with` that may be shown and compared: a run may come from anybody."""
    if isinstance(value, list):
        return [peer_text(str(each)) for each in value]
    return value if isinstance(value, int) else peer_text(str(value))


def circumstances() -> dict[str, Any]:
    """Everything but code and configuration that the last bit of a weight may depend on."""
    model, features = _processor()
    return {
        "troupe": installation.version(),
        "commit": installation.commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": model,
        "features": features,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "MKL_CBWR": os.environ.get("MKL_CBWR", ""),
    }


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Say, one line each, in what the circumstances of a certificate differ from those here."""
    found: list[str] = []
    for name, here in ours.items():
        there = theirs.get(name)
        if there == here:
            continue
        if isinstance(here, list) and isinstance(there, list):
            lacks, more = sorted(set(there) - set(here)), sorted(set(here) - set(there))
            both = (("not here: ", lacks), ("only here: ", more))
            found.append(f"{name}: " + "; ".join(what + " ".join(each) for what, each in both if each))
        else:
            found.append(f"{name}: {there or 'none'} in the certificate, {here or 'none'} here")
    return found


def _sha256(array: np.ndarray) -> str:
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    digest.update(array.tobytes())
    return digest.hexdigest()


def _processor() -> tuple[str, list[str]]:
    """Its name, and those of its features that arithmetic depends on; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor(), []
    said: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        said.setdefault(name.strip(), value.strip())
    flags = said.get("flags", said.get("Features", "")).split()
    return said.get("model name", platform.processor()), sorted(
        {flag for flag in flags if flag.startswith(_FEATURES)}
    )
