"""Precedence, errors and resuming: which value wins and what a wrong one says."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.configuration import compose_fields, markdown, presets_page
from troupe.common.config import (
    Config,
    changed_structure,
    check_resumable,
    config_from_dict,
    load_config,
    load_layers,
    preset_names,
    read_config,
    structural_hash,
    to_toml,
)
from troupe.common.config.env_section import DEFAULT_ENV, EnvConfig
from troupe.common.config.fields import role_of
from troupe.common.config.schema import SECTIONS
from troupe.common.errors import ConfigError

ROOT = Path(__file__).parents[2]

# One field of each kind that text can mean: number, text, choice, boolean, list.
VALUES = {
    "replay.batch_size": st.integers(1, 4096),
    "replay.samples_per_insert": st.floats(0, 100, allow_nan=False),
    "env.id": st.sampled_from(["atari:pong", "gym:CartPole-v1", "a.b:C-v0"]),
    "env.reward_clip": st.sampled_from(["none", "sign"]),
    "agent.double": st.booleans(),
    "agent.mlp_units": st.lists(st.integers(1, 512), max_size=3),
    "run.name": st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
}
LAYERS = ("command line", "sweep", "environment", "run", "preset")


def layer_values() -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries({}, optional=VALUES)


def as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def value_at(config: Config, path: str) -> object:
    section, _, name = path.partition(".")
    value = getattr(getattr(config, section), name)
    return list(value) if isinstance(value, tuple) else value


def as_toml(values: dict[str, object]) -> str:
    from troupe.common.config.text import format_toml

    tables: dict[str, dict[str, object]] = {}
    for path, value in values.items():
        section, _, name = path.partition(".")
        tables.setdefault(section, {})[name] = value
    return format_toml(tables)


@settings(max_examples=60, deadline=None)
@given(layers=st.fixed_dictionaries({name: layer_values() for name in LAYERS}))
def test_the_highest_layer_that_sets_a_field_wins(
    layers: dict[str, dict[str, object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("layers")
    for name in ("sweep", "preset"):
        (folder / f"{name}.toml").write_text(as_toml(layers[name]), "utf-8")
    run, sections = as_toml(layers["run"]), {path.partition(".")[0] for path in layers["run"]}
    empty = [f"[{section}]\n" for section in (*SECTIONS, "agent") if section not in sections]
    (folder / "config.toml").write_text(run + "".join(empty), "utf-8")
    resumed = bool(layers["run"])
    loaded = load_layers(
        str(folder / "preset.toml"),
        folder / "sweep.toml",
        {path: as_text(value) for path, value in layers["command line"].items()},
        {
            f"TROUPE_{path.replace('.', '__').upper()}": as_text(v)
            for path, v in layers["environment"].items()
        },
        run_config=folder / "config.toml" if resumed else None,
    )
    # One default, whether rewards are clipped, depends on the environment.
    defaults, of_run = (
        Config(env=EnvConfig(id=env_id))
        for env_id in (loaded.config.env.id, layers["run"].get("env.id", DEFAULT_ENV))
    )
    for path in VALUES:
        for name in LAYERS:
            # A run's configuration is complete: what its file leaves out is the default.
            if path in layers[name] or (name == "run" and resumed):
                expected = layers[name].get(path, value_at(of_run, path))
                break
        else:
            name, expected = "default", value_at(defaults, path)
        assert value_at(loaded.config, path) == expected
        word = {"sweep": "file", "preset": "preset", "run": "run"}.get(name, name)
        assert loaded.origins[path].startswith(word)


@settings(max_examples=60, deadline=None)
@given(
    values=layer_values(),
    kwargs=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
)
def test_a_configuration_survives_its_toml(values: dict[str, object], kwargs: dict[str, object]) -> None:
    tables = tomllib.loads(as_toml({**values, "env.kwargs": kwargs}))
    config = config_from_dict(tables)
    assert config.env.kwargs == kwargs
    assert config_from_dict(tomllib.loads(to_toml(config))) == config


def test_a_field_that_was_emptied_stays_empty_in_the_file_of_the_run(tmp_path):
    config = load_config("cartpole-impala", overrides={"agent.rho_bar": "none"})
    assert (config.agent.rho_bar, config.agent.c_bar, config.agent.target_entropy) == (None, 1.0, None)
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(run_config=tmp_path / "config.toml").agent.rho_bar is None
    assert load_config("pong-appo").agent.max_staleness is None
    assert config_from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1e6", 1_000_000), ("500_000", 500_000), ("7", 7)],
)
def test_whole_numbers_may_be_written_as_people_do(text: str, expected: int) -> None:
    assert load_config(overrides={"total-steps": text}).run.total_steps == expected


def test_names_may_have_dashes_and_tables_be_set_by_key() -> None:
    config = load_config(
        overrides={"env.frame-stack": "2", "env.kwargs.depth.of_it": "3", "env.kwargs.b": "[1]"}
    )
    assert config.env.frame_stack == 2
    assert config.env.kwargs == {"depth": {"of_it": 3}, "b": [1]}


def test_none_empties_an_optional_field(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[replay]\nmax_bytes = 1000\n")
    assert load_config(str(tmp_path / "a.toml")).replay.max_bytes == 1000
    assert load_config(str(tmp_path / "a.toml"), None, {"replay.max_bytes": "none"}).replay.max_bytes is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"replay.capacity": "3"}, ["replay.capacity", "nearest: replay.capacity_items", "command line"]),
        ({"batch_size": "3"}, ["batch_size", "nearest: replay.batch_size"]),
        ({"learner.learning_rate": "3"}, ["learner.learning_rate", "nearest: agent.learning_rate"]),
        ({"reply.shards": "3"}, ["reply", "nearest: replay.shards"]),
        ({"agent.algorithm": "apx"}, ["apx", "nearest: apex"]),
        ({"agent.gama": "0.9"}, ["agent.gama", "nearest: agent.gamma"]),
        ({"agent.gamma": "2"}, ["agent.gamma = 2", "less than or equal to 1"]),
        ({"replay.batch_size": "many"}, ["replay.batch_size", '"many"', "integer"]),
        ({"replay.batch_size": "1.5"}, ["replay.batch_size", "1.5", "integer"]),
        ({"replay.batch_size": "true"}, ["replay.batch_size", "number"]),
        ({"replay.batch_size": "0"}, ["replay.batch_size", "greater than or equal to 1"]),
        ({"agent.learning_rate": "nan"}, ["agent.learning_rate", "finite"]),
        ({"agent.double": "perhaps"}, ["agent.double", "perhaps", "should be true or false"]),
        ({"env.reward_clip": "sing"}, ["env.reward_clip", "nearest: sign"]),
        ({"env.kwargs": "5"}, ["env.kwargs", "should be a table as in TOML, such as {a = 1}"]),
        ({"env.kwargs": "{length=3"}, ["env.kwargs", "such as {a = 1}"]),
        ({"agent.mlp_units": "256"}, ["agent.mlp_units = 256", "a list as in TOML, such as [256, 256]"]),
        ({"agent.entropy_cost": "1"}, ["agent.entropy_cost", "field of impala, ", "not of apex"]),
        ({"env.id.x": "5"}, ["env.id", "no fields of its own"]),
        ({"net.control": "localhost:1"}, ["net.control", "tcp://"]),
        ({"net.control": "tcp://a:99999"}, ["net.control", "port"]),
        ({"net.liveness_s": "1"}, ["liveness_s", "twice heartbeat_s"]),
        ({"net.heartbeat_s": "1e-9"}, ["net.heartbeat_s", "0.01"]),
        ({"net.heartbeat_s": "nan"}, ["net.heartbeat_s", "finite"]),
        ({"net.liveness_s": "inf"}, ["net.liveness_s", "finite"]),
        ({"net.liveness_s": "1e9"}, ["net.liveness_s", "3600"]),
        ({"net.connect_timeout_s": "1e9"}, ["net.connect_timeout_s", "86400"]),
        ({"replay.min_items": "3", "replay.capacity_items": "2"}, ["replay.min_items", "capacity_items"]),
        (
            {"replay.samples_per_insert": "1", "replay.samples_per_insert_error": "9"},
            ["samples_per_insert_error (9)", "replay.batch_size (512)"],
        ),
        ({"learner.device": "tpu"}, ["learner.device", "cuda"]),
    ],
)
def test_a_wrong_field_or_value_is_one_line_that_helps(overrides: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, None, overrides)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_an_error_names_the_layer_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[replay]\nbatch_size = 'x'\n")
    with pytest.raises(ConfigError, match=r"a\.toml"):
        load_config(str(tmp_path / "a.toml"))
    with pytest.raises(ConfigError, match="environment"):
        load_config(environ={"TROUPE_REPLAY__BATCH_SIZ": "3"})
    (tmp_path / "a.toml").write_text("batch_size = 3\n")
    with pytest.raises(ConfigError, match="outside any section"):
        load_config(str(tmp_path / "a.toml"))
    (tmp_path / "a.toml").write_text("[agent]\nalgorithm = ['apex']\n")
    with pytest.raises(ConfigError, match="unknown algorithm"):
        load_config(str(tmp_path / "a.toml"))
    (tmp_path / "a.toml").write_text("[nowhere]\n")
    with pytest.raises(ConfigError, match="unknown section 'nowhere'"):
        load_config(str(tmp_path / "a.toml"))
    with pytest.raises(ConfigError, match=r"unknown section 'lerner' \(command line\); nearest: learner$"):
        load_config(overrides={"lerner.batch": "3"})
    with pytest.raises(ConfigError, match=r"unknown section 'lerner' .*; nearest: learner.device$"):
        load_config(overrides={"lerner.device": "cpu"})
    (tmp_path / "a.toml").write_text("[[[")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(str(tmp_path / "a.toml"))


def test_a_file_may_begin_as_editors_of_windows_write_it(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[run]\r\nseed = 7\r\n")
    assert load_config(str(tmp_path / "a.toml")).run.seed == 7


def test_an_unknown_field_is_named_the_same_without_the_algorithm() -> None:
    with pytest.raises(ConfigError, match=r"^unknown field run.sed \(a file\); nearest: run.seed$"):
        config_from_dict({"run": {"sed": 1}}, source="a file", typed_agent=False)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TROUPE_REPLAY_BATCH_SIZE", "TROUPE_REPLAY__BATCH_SIZE"),
        ("TROUPE_REPLAY_BATCHSIZE", "TROUPE_REPLAY__BATCH_SIZE"),
        ("TROUPE_AGENT_ENTROPY_COST", "TROUPE_AGENT__ENTROPY_COST"),
    ],
)
def test_a_variable_with_one_underscore_is_refused(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} sets no field: did you mean {meant}"):
        load_config(environ={name: "3"})


def test_the_other_variables_of_the_services_are_left_alone() -> None:
    for name in ("RUN", "RUN_DIR", "METRICS_PORT", "REPLAY_MEMORY", "ACTOR_CPUS", "ENV_CALLS", "ACTORS"):
        load_config(environ={f"TROUPE_{name}": "3"})


def test_other_variables_of_the_environment_are_left_alone() -> None:
    assert load_config(environ={"TROUPE_HOME": "/x", "PATH": "/bin"}) == Config()


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid(name: str) -> None:
    config = load_config(name)
    assert config.run.preset == name
    assert config.replay.min_items <= config.replay.capacity_items


def test_the_paper_preset_has_the_papers_values() -> None:
    config = load_config("pong-apex-paper")
    agent, replay = config.agent, config.replay
    assert (config.total_slots, config.actor.chunk_steps, config.learner.prefetch) == (360, 50, 16)
    assert (replay.capacity_items, replay.min_items, replay.batch_size) == (2_000_000, 50_000, 512)
    assert (replay.priority_exponent, replay.importance_exponent) == (0.6, 0.4)
    assert (agent.n_steps, agent.gamma, agent.double, agent.dueling) == (3, 0.99, True, True)
    assert (agent.optimizer, agent.learning_rate) == ("rmsprop", 0.00025 / 4)
    assert (agent.rmsprop_decay, agent.optimizer_epsilon, agent.max_grad_norm) == (0.95, 1.5e-7, 40)
    assert (agent.epsilon_base, agent.epsilon_alpha) == (0.4, 7)
    assert agent.target_update_period_updates == 2500
    assert config.actor.params_period_steps * config.env.frame_skip == 400


def resumed(tmp_path: Path, began: dict[str, str], overrides: dict[str, str]) -> tuple[Config, Config]:
    file = tmp_path / "config.toml"
    file.write_text(to_toml(load_config("pong-apex", None, began)))
    return read_config(file), load_config(None, None, overrides, run_config=file)


def test_on_resume_tunable_fields_may_change_and_operational_ones_stay_behind(tmp_path: Path) -> None:
    old, new = resumed(
        tmp_path,
        {"net.control": "tcp://10.0.0.9:1", "learner.prefetch": "3"},
        {"agent.learning_rate": "1e-3"},
    )
    assert new.net.control == Config().net.control
    assert new.learner.prefetch == 3
    assert [str(change) for change in check_resumable(old, new)] == [
        f"agent.learning_rate: {old.agent.learning_rate} -> 0.001"
    ]
    assert structural_hash(old) == structural_hash(new)


def test_on_resume_structural_fields_must_match(tmp_path: Path) -> None:
    old, new = resumed(tmp_path, {}, {"env.frame_stack": "2", "agent.gamma": "0.9"})
    with pytest.raises(ConfigError, match=r"env\.frame_stack: 4 -> 2; agent\.gamma"):
        check_resumable(old, new)
    assert structural_hash(old) != structural_hash(new)


def test_a_checkpoint_of_a_version_without_a_field_has_its_default() -> None:
    table = {"name": "default", "limiter": "queue", "capacity": 64}
    config = load_config("cartpole-impala", None, {"replay.tables": [table], "replay.batch_size": 32})
    written = json.loads(json.dumps(config.to_dict()))
    assert changed_structure(written, config) == []
    del written["actor"]["hindsight_copies"], written["agent"]["trust_region"]
    del written["replay"]["tables"][0]["share"]
    written["agent"]["of_an_earlier_version"] = 1
    assert changed_structure(written, config) == []
    written["env"]["frame_stack"] = 2
    written["replay"]["tables"][0]["capacity"] = 128
    first, second = changed_structure(written, config)
    assert first == "env.frame_stack = 2 instead of 4"
    assert second.startswith("replay.tables = ")
    assert "128" in second
    written["agent"] = {"algorithm": "apex"}
    assert "a section [agent] that is none here" in changed_structure(written, config)
    assert changed_structure(None, config) == ["no configuration"]


def test_a_run_whose_configuration_was_cut_is_not_resumed_with_defaults(tmp_path: Path) -> None:
    """An empty file was the defaults: Atari's Pong, in the place of whatever the run was."""
    from troupe.common.config import to_toml

    file, text = tmp_path / "config.toml", to_toml(load_config("cartpole-ppo"))
    for kept in ("", text[: text.index("[learner]")]):
        file.write_text(kept)
        with pytest.raises(ConfigError, match=r"config.toml is damaged: it has no section \["):
            load_config(run_config=file)


def test_a_run_whose_preset_file_is_gone_can_be_resumed(tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text("[run]\nseed = 9\n")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(load_config(str(preset))))
    assert read_config(file).run.preset == str(preset)
    preset.unlink()
    assert load_config(run_config=file).run.seed == 9


def test_every_field_has_a_description_and_a_role() -> None:
    for section, model in {**SECTIONS, "agent": type(Config().agent)}.items():
        for name, info in model.model_fields.items():
            assert info.description, f"{section}.{name}"
            assert isinstance(info.json_schema_extra, dict), f"{section}.{name}"
            assert info.json_schema_extra["role"] == role_of(model, name)


def test_without_torch_the_agent_section_is_kept_as_it_is() -> None:
    config = load_config("pong-apex")
    untyped = config_from_dict(config.to_dict(), typed_agent=False)
    assert untyped.replay == config.replay
    assert untyped.agent.learning_rate == config.agent.learning_rate
    with pytest.raises(ValueError, match="untyped"):
        structural_hash(untyped)
    with pytest.raises(ConfigError, match=r"^agent\.algorithm = 7 \(the run\): "):
        config_from_dict({"agent": {"algorithm": 7}}, source="the run", typed_agent=False)


def test_the_page_of_all_fields_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text("utf-8") == markdown(), "run `make docs`"


def test_the_page_of_presets_is_up_to_date() -> None:
    assert (ROOT / "docs" / "presets.md").read_text("utf-8") == presets_page(), "run `make docs`"


def test_the_list_of_variables_for_containers_is_up_to_date() -> None:
    written = (ROOT / "deploy" / "docker" / "fields.yml").read_text("utf-8")
    assert written == compose_fields(), "run `make docs`"


def test_the_table_of_a_run_is_found_by_name():
    plain = load_config("pong-apex", None, {}, {}).replay
    table = plain.table()
    assert table is not None
    assert (table.capacity, table.min_items) == (plain.capacity_items, plain.min_items)
    assert plain.table("rollouts") is None
    queue = load_config("pong-impala", None, {}, {}).replay.table()
    assert queue is not None
    assert queue.is_queue


def test_an_environment_of_a_run_from_before_the_packages_moved_is_found() -> None:
    config = config_from_dict({"env": {"id": "common.envs.recall:Recall-v0", "reward_clip": "none"}})
    assert config.env.id == "troupe.common.envs.recall:Recall-v0"


def test_rewards_are_reduced_to_their_sign_in_atari_games_only(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('[env]\nid = "gym:Pendulum-v1"\n')
    assert load_config(str(own)).env.reward_clip == "none"
    assert load_config(str(own), None, {"env.id": "atari:breakout"}).env.reward_clip == "sign"
    assert load_config("pong-apex").env.reward_clip == "sign"
    assert load_config("pong-apex", None, {"env.id": "gym:CartPole-v1"}).env.reward_clip == "none"
    assert load_config("pong-apex", None, {"env.reward_clip": "none"}).env.reward_clip == "none"
    assert load_config(str(own), None, {"env.reward_clip": "sign"}).env.reward_clip == "sign"


@pytest.mark.parametrize("text", ["{}", "none"])
def test_the_kwargs_of_a_preset_are_for_its_own_environment(tmp_path, text):
    assert load_config("bitflip-apex").env.kwargs == {"bits": 10}
    assert load_config("bitflip-apex", None, {"env.kwargs": text}).env.kwargs == {}
    assert load_config("bitflip-apex", None, {"env.kwargs.more": "1"}).env.kwargs == {"bits": 10, "more": 1}
    own = {"env.id": "my:Goal-v0"}
    loaded = load_layers("bitflip-apex", None, own)
    assert (loaded.config.env.kwargs, loaded.origins["env.kwargs"]) == ({}, "default")
    assert load_config("bitflip-apex", None, {**own, "env.kwargs.size": "9"}).env.kwargs == {"size": 9}
    variables = {"TROUPE_ENV__KWARGS": "{size = 3}"}
    assert load_config("bitflip-apex", None, own, variables).env.kwargs == {"size": 3}
    file = tmp_path / "own.toml"
    file.write_text(f"[env]\nkwargs = {text if text == '{}' else chr(34) + text + chr(34)}\n")
    assert load_config("bitflip-apex", file).env.kwargs == {}
    file.write_text('[env]\nid = "my:Goal-v0"\nkwargs = {size = 5}\n')
    assert load_config("bitflip-apex", file).env.kwargs == {"size": 5}
    other = load_config("football-vtrace", None, {"env.id": "football:academy_empty_goal_close"})
    assert other.env.kwargs["width"] == 96, "options of the whole family stay"


def test_a_file_begins_from_the_preset_that_it_names(tmp_path: Path) -> None:
    own, other = tmp_path / "own.toml", tmp_path / "other.toml"
    own.write_text('preset = "cartpole-ppo"\n[agent]\ngamma = 0.5\n')
    other.write_text('preset = "./own.toml"\n[env]\nid = "gym:Acrobot-v1"\n[agent]\nepochs = 3\n')
    loaded = load_layers(str(other), None, {"agent.minibatch_steps": "64"})
    config, plain = loaded.config, load_config("cartpole-ppo")
    assert (config.agent.gamma, config.agent.epochs, config.agent.minibatch_steps) == (0.5, 3, 64)
    assert config.agent.learning_rate == plain.agent.learning_rate
    assert (config.env.id, config.replay, config.run.preset) == ("gym:Acrobot-v1", plain.replay, str(other))
    origins = [loaded.origins[f"agent.{name}"] for name in ("epochs", "gamma", "learning_rate")]
    assert origins == [f"file {other}", f"file {own}", "preset cartpole-ppo"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(config))
    own.unlink()  # a run goes on without it
    resumed = load_config(run_config=tmp_path / "run" / "config.toml")
    assert resumed.agent == config.agent


def test_what_a_file_over_a_preset_chooses_is_checked_as_its_own(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('preset = "pong-apex"\n[env]\nframe_skip = 2\n')
    assert "frame_skip" in load_layers(str(own)).chosen("env")
    own.write_text('preset = "bitflip-apex"\n[env]\nid = "my:Goal-v0"\n')
    assert load_config(str(own)).env.kwargs == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('preset = "own.toml"', "leads back to itself"),
        ('preset = "cartpole-pp"', "unknown preset 'cartpole-pp'; nearest: cartpole-ppo"),
        ("preset = 5", 'preset = "NAME"'),
        ('preset = "gone.toml"', "cannot read .*gone.toml"),
    ],
)
def test_a_wrong_base_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(str(own))
    assert "\n" not in str(error.value)


def test_a_sweep_file_that_begins_from_a_preset_is_told_where_it_belongs(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('preset = "cartpole-ppo"')
    with pytest.raises(ConfigError, match=f"troupe train {own}"):
        load_config("cartpole-ppo", own)
