"""An exported policy decides as the agent does: with its memory, its statistics, for each kind of network."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.agents.contract import PIXELS, VECTORS
from tests.agents.contract import played as chunks_of
from tests.agents.matches import match
from tests.agents.replayed import batch_of, windows
from tests.cli.exported import onnx, torchscript
from troupe.common.agents import make_agent
from troupe.common.agents.apex import ApexConfig
from troupe.common.agents.base import Batch, Inputs
from troupe.common.agents.impala import ImpalaConfig
from troupe.common.agents.policy_gradient import PolicyGradientConfig
from troupe.common.agents.pqn import PqnConfig
from troupe.common.agents.r2d2 import R2d2Config
from troupe.common.agents.sac import SacConfig
from troupe.common.config import EnvConfig, load_config
from troupe.common.errors import ConfigError
from troupe.common.spaces import unpacked
from troupe.services.actor.local_inference import Rollout
from troupe.services.export import command as export
from troupe.services.export import formats
from troupe.services.export.acting import Acting

SMALL = {"mlp_units": (8,), "hidden_units": 16}
MEMORY = {"lstm_units": 5, "see_last_step": True, "unroll_steps": 4}
ODD_PIXELS = PIXELS.model_copy(update={"frame_size": 52})
"""Of which poolings leave 7 x 7."""
FAMILIES = {
    "apex": (ApexConfig(**SMALL), VECTORS),
    "apex-pixels": (ApexConfig(hidden_units=16, torso="small"), PIXELS),
    "apex-btr": (ApexConfig(hidden_units=16, torso="btr", noise=0.5, quantiles=4), ODD_PIXELS),
    "r2d2": (R2d2Config(**SMALL, lstm_units=6), VECTORS),
    "pqn-memory": (PqnConfig(**SMALL, **MEMORY, normalize_vectors=True), VECTORS),
    "impala-pixels": (ImpalaConfig(hidden_units=16, **MEMORY, lstm_layers=2), PIXELS),
    "ppo-reals": (
        PolicyGradientConfig(**SMALL, normalize_vectors=True, unroll_steps=4, shared_torso=False),
        match("box"),
    ),
    "ppo-nest": (PolicyGradientConfig(**SMALL, **MEMORY), match("tuple")),
    "ppo-parts": (
        PolicyGradientConfig(torso="shallow", mlp_units=(8,), hidden_units=8, unroll_steps=4),
        EnvConfig(id="tests.envs.matching:Read-v0", reward_clip="none"),
    ),
    "sac-reals": (SacConfig(mlp_units=(8,), normalize_vectors=True), match("box")),
    "sac-atoms": (SacConfig(mlp_units=(8,), atoms=5, layer_norm=True), match("box")),
    "sac-choice": (SacConfig(mlp_units=(8,)), VECTORS),
    "sac-memory": (
        SacConfig(mlp_units=(8,), lstm_units=5, sequence_steps=4, sequence_period_steps=2),
        match("box"),
    ),
}


def learned(config, env):
    """An agent whose statistics have seen something and whose decisions differ, and a rollout of it."""
    from troupe.common.envs import make_vector

    vector = make_vector(env, 2, 0)
    agent = make_agent(config, vector.spec, seed=3)
    chunks = chunks_of(agent, env)
    agent.update(arguments(agent, chunks))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in agent.net.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return agent, Rollout(agent, vector, 6, seed=0)


def arguments(agent, chunks):
    fields, lengths = batch_of(windows(chunks, agent.fields)[:4])
    return Batch(fields, np.ones(len(lengths), np.float32), lengths, measure=False)


def feeds(acting, agent, inputs):
    """What the file is given for an agent's inputs, as numpy."""
    arrays = {
        "obs": inputs.obs,
        "last_action": inputs.last_action,
        "last_reward": inputs.last_reward,
        "first": inputs.first,
        "memory": inputs.memory,
    }
    if agent.spec.obs_leaves:
        rows = [list(unpacked(agent.spec.obs_leaves, row)) for row in inputs.obs]
        names = [name for name in acting.inputs if name.startswith("obs.")]
        arrays |= {name: np.stack(parts) for name, parts in zip(names, zip(*rows, strict=True), strict=True)}
    return {name: arrays[name] for name in acting.inputs}


def anything(agent, rng):
    """Inputs as they may be: also the first of an episode, and stacks with padding."""
    spec = agent.spec
    obs = rng.normal(0.0, 3.0, (2, *spec.obs_shape)).astype(np.float32)
    if spec.obs_dtype == "uint8":
        obs = rng.integers(0, 255, (2, *spec.obs_shape), np.uint8)
        obs[0, : rng.integers(max(1, spec.stack))] = 0
    return Inputs(
        obs,
        spec.actions.random(rng, 2),
        rng.normal(size=2).astype(np.float32),
        rng.random(2) < 0.3,
        rng.normal(size=(2, agent.memory_size)).astype(np.float32),
    )


@pytest.mark.parametrize("load", [torchscript, onnx])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_policy_chooses_as_the_agent_does(family, load):
    if load is onnx:
        pytest.importorskip("onnx", reason="needs the extra troupe[export]")
    config, env = FAMILIES[family]
    agent, rollout = learned(config, env)
    acting = Acting(agent, 2).eval()
    run = load(formats.WRITERS[load.__name__](acting, agent, json.dumps({"algorithm": "x"})), acting)
    said, rng = [], np.random.default_rng(0)
    rollout.explore([0, 1], 2)
    for _ in range(16):
        inputs = anything(agent, rng)
        if agent.spec.obs_leaves:  # not every byte is a choice that there is
            inputs = replace(inputs, obs=rollout._slots.inputs.obs)
            rollout.step(0)
        act = agent.act(inputs, np.zeros(2, np.float32), rng)
        results = dict(zip(acting.outputs, run(feeds(acting, agent, inputs)), strict=True))
        if agent.spec.actions.reals:
            np.testing.assert_allclose(results["action"], act.action, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(results["action"], act.action)
        if agent.memory_size:
            np.testing.assert_allclose(results["next_memory"], act.memory, rtol=1e-3, atol=1e-5)
        said.append(results[acting.outputs[1]])
    rollout.env.close()
    assert np.std(np.array(said), axis=0).max() > 1e-2, "the same for everything proves nothing"


def test_padding_of_a_stack_is_nothing_in_a_file_too():
    """Frames from before an episode's start are 0, not black pixels minus their mean."""
    from troupe.common.nets.pixels import NormalizedPixels

    inputs, rng = NormalizedPixels((12, 12), 4), np.random.default_rng(0)
    inputs.observe(torch.from_numpy(rng.integers(60, 255, (50, 4, 12, 12), np.uint8)))
    obs = torch.from_numpy(rng.integers(0, 255, (5, 4, 12, 12), np.uint8))
    for row, padded in enumerate((0, 1, 3, 4)):
        obs[row, :padded] = 0
    traced = torch.jit.trace(inputs, (obs,), check_trace=False)
    torch.testing.assert_close(traced(obs), inputs(obs))
    assert (inputs(obs)[1, 0] == 0).all()
    assert (inputs(obs)[3, 3] != 0).any()


def test_the_command_writes_files_that_say_what_they_are(tmp_path, capsys):
    from dataclasses import asdict

    from safetensors import safe_open

    from troupe.common.envs import make_spec
    from troupe.common.runtime.checkpoint import save_checkpoint

    config = load_config("cartpole-apex", None, {"agent.mlp_units": "[8]", "agent.hidden_units": "8"}, {})
    spec = make_spec(config.env)
    agent = make_agent(config.agent, spec, seed=1)
    arrays, meta = agent.state()
    whole = {
        "steps": 70,
        "agent": meta,
        "config": config.to_dict(),
        "spec": asdict(spec),
        "troupe": {"version": "1"},
    }
    save_checkpoint(tmp_path / "checkpoints", arrays, whole)
    words = [str(tmp_path), "--out", str(tmp_path / "policy"), "--json", "--format"]
    assert export.main([*words, "torchscript", "--slots", "3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["inputs"] == {"obs": {"shape": [3, 4], "dtype": "float32"}}
    assert told["outputs"]["action"] == {"shape": [3], "dtype": "int64"}
    assert (told["steps"], told["troupe"]) == (70, {"version": "1"})
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    action, _ = torch.jit.load(tmp_path / "policy")(torch.from_numpy(obs))
    with torch.no_grad():
        assert action.tolist() == agent.net(torch.from_numpy(obs)).argmax(1).tolist()
    assert export.main([*words, "safetensors"]) == 0
    with safe_open(tmp_path / "policy", "numpy") as file:
        assert json.loads(file.metadata()[formats.NAME])["env"]["id"] == "gym:CartPole-v1"
        np.testing.assert_array_equal(file.get_tensor("hidden.weight"), agent.params()["hidden.weight"])


def test_what_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    config, env = FAMILIES["apex"]
    agent, rollout = learned(config, env)
    rollout.env.close()
    checkpoint = export.Checkpoint({}, {}, tmp_path)
    whole = load_config("cartpole-apex", None, {}, {})
    with pytest.raises(ConfigError, match="cannot write"):
        export.export(agent, whole, checkpoint, "torchscript", tmp_path / "none" / "file")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"needs the package onnx: pip install .*export"):
        export.export(agent, whole, checkpoint, "onnx", tmp_path / "file")
    agent.decide = super(type(agent), agent).decide  # one that does not say how
    with pytest.raises(ConfigError, match="does not define how it chooses actions"):
        export.export(agent, whole, checkpoint, "torchscript", tmp_path / "file")
