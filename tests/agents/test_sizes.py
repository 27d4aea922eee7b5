"""Sizes that nobody can mean end in one line, wherever they come from, and take no memory first."""

import subprocess
import sys

import pytest

from troupe.common.agents import make_agent
from troupe.common.config.algorithms import agent_model
from troupe.common.config.env_section import EnvConfig
from troupe.common.config.loading import config_from_dict
from troupe.common.envs import make_spec
from troupe.common.errors import ConfigError

ABSURD = 10**12
SIZES = [
    ("apex", "hidden_units", ABSURD),
    ("apex", "mlp_units", [64, ABSURD]),
    ("apex", "mlp_units", [0]),
    ("apex", "mlp_units", [8] * 1000),
    ("impala", "lstm_units", ABSURD),
    ("impala", "lstm_layers", ABSURD),
    ("impala", "unroll_steps", ABSURD),
    ("policy_gradient", "hidden_units", ABSURD),
    ("policy_gradient", "unroll_steps", ABSURD),
    ("r2d2", "head_units", ABSURD),
    ("r2d2", "sequence_steps", ABSURD),
    ("r2d2", "burn_in_steps", ABSURD),
]
ENV = {"id": "gym:CartPole-v1"}


@pytest.mark.parametrize(("algorithm", "name", "value"), SIZES)
def test_a_size_is_bounded(algorithm, name, value):
    with pytest.raises(ConfigError, match=rf"agent\.{name}") as refused:
        config_from_dict({"env": ENV, "agent": {"algorithm": algorithm, name: value}})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("algorithm", ["apex", "impala", "policy_gradient", "r2d2"])
def test_a_network_that_is_larger_than_memory_is_refused_before_it_is_made(algorithm):
    config = agent_model(algorithm)(mlp_units=(1 << 16,) * 64)
    with pytest.raises(ConfigError, match=r"the network would need [\d,.]+ GiB of the [\d,.]+ GiB of memory"):
        make_agent(config, make_spec(EnvConfig(id="gym:CartPole-v1")))


def test_a_preset_with_absurd_sizes_ends_in_one_line(tmp_path):
    path = tmp_path / "absurd.toml"
    path.write_text(f'[env]\nid = "gym:CartPole-v1"\n[agent]\nalgorithm = "impala"\nlstm_units = {ABSURD}\n')
    words = [sys.executable, "-m", "troupe", "train", str(path), "--run-dir", str(tmp_path / "run")]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), run.stderr
    assert "agent.lstm_units" in run.stderr
    assert not (tmp_path / "run").exists()
