"""`--algo NAME --env ID`: values for an algorithm and a kind of environment, without a preset."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import troupe.services.__main__ as cli
from troupe.common.config import Config, EnvConfig, load_config, read_config
from troupe.common.errors import ConfigError
from troupe.services.environment import check as checking
from troupe.services.launcher import by_kind
from troupe.services.launcher.training import check_environment

pytestmark = pytest.mark.usefixtures("elsewhere")

VECTOR, REALS = "tests.envs.counting:Counting-v0", "gym:Pendulum-v1"
PIXELS, GRID = "tests.envs.counting:Colour-v0", "minatar:breakout"


@pytest.fixture(scope="module", autouse=True)
def each_environment_is_tried_once() -> Iterator[None]:
    """A trial starts a process, and what it finds is the same for every algorithm."""
    check, found = checking.check, {}

    def remembered(config: EnvConfig, **options: Any) -> checking.Findings:
        key = (config.model_dump_json(), *options.items())
        if key not in found:
            found[key] = check(config, **options)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "check", remembered)
        yield


def trained(algo: str, env_id: str, **fields: str) -> Config:
    """The configuration that a training would have; its agent has been made."""
    patient = {"env.check_timeout_s": "200"}  # a suite's packages are slow to import
    loaded = by_kind.load(algo, None, {"env": env_id, **patient, **fields}, {})
    check_environment(loaded, play=False)
    return loaded.config


@pytest.mark.parametrize("env_id", [VECTOR, REALS, PIXELS, GRID])
@pytest.mark.parametrize("algo", by_kind.NAMES)
def test_every_algorithm_has_values_for_what_it_can_learn(algo: str, env_id: str) -> None:
    takes_reals = by_kind.NAMES[algo] in ("policy_gradient", "impala", "sac", "td3", "iql", "td3_bc")
    for_vectors = algo in ("sac", "iql", "td3_bc")
    for_reals = algo in ("td3", "ddpg")
    if (
        (env_id == REALS and not takes_reals)
        or (for_vectors and env_id in (PIXELS, GRID))
        or (for_reals and env_id != REALS)
    ):
        other = "--env.action_bins 11" if env_id == REALS else "a TOML file"
        with pytest.raises(
            ConfigError, match=(f"{algo} has no starting values .* take --algo ppo, or {other}")
        ):
            trained(algo, env_id)
        return
    config = trained(algo, env_id)
    assert config.agent.algorithm == by_kind.NAMES[algo]
    assert (config.env.id, config.env.kwargs, config.env.reward_clip) == (env_id, {}, "none")
    assert getattr(config.agent, "torso", "auto") == "auto"
    assert getattr(config.agent, "reward_clip", "none") == "none"


def test_values_go_by_what_the_environment_shows_and_takes() -> None:
    discrete, reals, pixels, grid = (trained("ppo", env_id) for env_id in (VECTOR, REALS, PIXELS, GRID))
    assert discrete.agent.normalize_vectors
    assert discrete.agent.reward_scale == 1.0
    assert (discrete.agent.entropy_cost, reals.agent.entropy_cost) == (0.01, 0.0)
    assert (pixels.agent.hidden_units, grid.agent.hidden_units) == (256, 128)


@pytest.mark.parametrize("env_id", [VECTOR, PIXELS, GRID])
def test_names_of_others_are_what_their_papers_say(env_id: str) -> None:
    def said(algo: str, *names: str) -> list[object]:
        config = trained(algo, env_id)
        return [getattr(config.agent, name) for name in names] + [config.replay.priority_exponent]

    q_learning = "n_steps", "double", "dueling", "noise", "quantiles"
    assert said("dqn", *q_learning) == [1, False, False, 0.0, 0, 0.0]
    assert said("double_dqn", *q_learning) == [1, True, False, 0.0, 0, 0.0]
    assert said("rainbow", *q_learning) == [3, True, True, 0.5, 8, 0.5]


def test_ddpg_is_td3_with_one_critic_and_without_noise_or_delay() -> None:
    names = "critics", "target_noise", "policy_period_updates", "exploration_noise"
    td3, ddpg = ([getattr(trained(algo, REALS).agent, name) for name in names] for algo in ("td3", "ddpg"))
    assert (td3, ddpg) == ([2, 0.2, 2, 0.1], [1, 0.0, 1, 0.1])


@pytest.mark.parametrize("env_id", [VECTOR, REALS, PIXELS, GRID, "atari:pong", "atari:seaquest"])
def test_a2c_makes_one_pass_over_what_its_own_policy_played(env_id: str) -> None:
    config = trained("a2c", env_id)
    agent: Any = config.agent
    assert (agent.policy_loss, agent.epochs, agent.minibatch_steps, agent.unroll_steps) == ("vpg", 1, 0, 5)
    assert (agent.max_staleness, agent.clips_around_the_actor, agent.lambda_) == (0, True, 1.0)
    # Every slot's unroll is in the batch, and the next one is played by the policy that learned from it.
    assert config.replay.batch_size == config.actor.slots * config.actor.processes
    assert config.learner.publish_period_updates == 1


def test_what_is_given_is_above_the_values_of_a_name() -> None:
    loaded = by_kind.load("dqn", None, {"env": VECTOR, "agent.dueling": "true"}, {})
    assert loaded.config.agent.dueling  # type: ignore[attr-defined]
    assert loaded.origins["agent.dueling"] == "command line"
    assert loaded.origins["agent.double"] == "--algo dqn"


def test_the_help_and_the_pages_name_all_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert by_kind.NAMES.keys() - words <= {"policy_gradient"}  # the help says ppo
    for page in ("docs/presets.md", "docs/coming-from.md"):
        text = (Path(__file__).parents[2] / page).read_text()
        assert [name for name in by_kind.NAMES if not re.search(rf"`{name}\b", text)] == []


def test_atari_games_have_the_values_of_the_preset_for_any_of_them() -> None:
    pong, seaquest = trained("ppo", "atari:pong"), trained("ppo", "atari:seaquest")
    assert pong.agent == load_config("pong-ppo").agent
    assert seaquest.agent == load_config("atari-ppo").agent
    assert seaquest.run.total_steps == 10_000_000
    assert trained("impala", "atari:seaquest").agent == load_config("pong-impala").agent


def test_an_algorithm_outside_this_tree_has_its_own_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "outside"))
    config = trained("my_package.munchausen", VECTOR)
    assert (config.agent.algorithm, config.agent.alpha) == ("my_package.munchausen", 0.9)  # type: ignore[attr-defined]
    assert config.replay.min_items == load_config("cartpole-apex").replay.min_items


def test_another_algorithm_over_a_preset_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('preset = "cartpole-ppo"\n[agent]\nalgorithm = "apex"\n')
    line = r"agent\.algorithm 'apex' \(file .*own.toml\) does not match the preset cartpole-ppo, .* of"
    with pytest.raises(ConfigError, match=line):
        load_config(str(file), None, {}, {})


def test_other_layers_are_above(tmp_path: Path) -> None:
    file = tmp_path / "over.toml"
    file.write_text('[env]\nid = "gym:Pendulum-v1"\n[agent]\nepochs = 7\n')
    loaded = by_kind.load("ppo", file, {"agent.gamma": "0.5"}, {"TROUPE_AGENT__LEARNING_RATE": "0.125"})
    agent = loaded.config.agent
    assert (agent.epochs, agent.gamma, agent.learning_rate) == (7, 0.5, 0.125)
    assert loaded.origins["agent.deviation"] == "preset halfcheetah-ppo"


def test_config_show_prints_what_train_takes(
    launched: list[tuple[Config, Path, bool, bool | None]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--algo", "ppo", "--env", "gym:CartPole-v1", "--seed", "3"]
    assert cli.main(["config", "show", *words]) == 0
    (tmp_path / "shown.toml").write_text(capsys.readouterr().out)
    assert cli.main(["train", *words]) == 0
    [(config, run_dir, _, _)] = launched
    assert config == read_config(tmp_path / "shown.toml")
    assert run_dir.name.startswith("ppo-CartPole-v1-")
    assert (config.run.seed, config.run.preset) == (3, "")


@pytest.mark.parametrize("env_id", [VECTOR, REALS])
def test_data_sets_are_learned_from_with_the_values_of_the_papers_and_not_of_pendulum(env_id: str) -> None:
    iql, td3_bc = trained("iql", env_id).agent, trained("td3_bc", env_id).agent
    assert (iql.gamma, iql.expectile) == (0.99, 0.7)  # type: ignore[attr-defined]
    assert (td3_bc.gamma, td3_bc.q_weight) == (0.99, 2.5)  # type: ignore[attr-defined]
