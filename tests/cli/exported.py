"""Exported policies, read as other programs read them."""

import io
import json

import pytest
import torch

from troupe.services.export import formats


def torchscript(data, acting):
    described = {formats.NAME: ""}
    module = torch.jit.load(io.BytesIO(data), _extra_files=described)
    assert json.loads(described[formats.NAME])["algorithm"]
    return lambda named: [each.numpy() for each in module(*map(torch.from_numpy, named.values()))]


def onnx(data, acting):
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra troupe[export]")
    session = runtime.InferenceSession(data)
    assert [each.name for each in session.get_inputs()] == list(acting.inputs)
    assert [each.name for each in session.get_outputs()] == list(acting.outputs)
    assert json.loads(session.get_modelmeta().custom_metadata_map[formats.NAME])["algorithm"]
    return lambda named: session.run(None, dict(named))
