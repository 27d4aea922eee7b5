"""Files of a policy for other programs: TorchScript, ONNX, safetensors."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import torch

from troupe.common.agents import Agent
from troupe.services.export.acting import Acting

OPSET = 17
"""Of ONNX: the newest that the exporter knows whole."""
NAME = "troupe.json"
"""Under which the description is in the file."""


def _torchscript(acting: Acting, agent: Agent, description: str) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # of shapes that become constants, as they should
        # A trace, not a script: it needs no annotations in the networks, and no branch of a decision depends
        # on data. Its own check would run everything again.
        traced = torch.jit.trace(acting, tuple(acting.inputs.values()), check_trace=False)
        torch.jit.save(torch.jit.freeze(traced), buffer, _extra_files={NAME: description})
    return buffer.getvalue()


def _onnx(acting: Acting, agent: Agent, description: str) -> bytes:
    import onnx

    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            acting,
            tuple(acting.inputs.values()),
            buffer,  # type: ignore[arg-type]
            input_names=list(acting.inputs),
            output_names=list(acting.outputs),
            opset_version=OPSET,
            dynamo=False,  # the other exporter needs a package more, and refuses what depends on data
        )
    model = onnx.load_from_string(buffer.getvalue())
    # Here, where the error names the algorithm that was exported, not in the user's program.
    onnx.checker.check_model(model)
    model.producer_name = "troupe"
    onnx.helper.set_model_props(model, {NAME: description})
    written: bytes = model.SerializeToString()
    return written


def _safetensors(acting: Acting, agent: Agent, description: str) -> bytes:
    from safetensors.numpy import save

    written: bytes = save(agent.params(), metadata={NAME: description})
    return written


WRITERS: dict[str, Callable[[Acting, Agent, str], bytes]] = {
    "onnx": _onnx,
    "safetensors": _safetensors,
    "torchscript": _torchscript,
}
"""By format: the bytes of a file."""
