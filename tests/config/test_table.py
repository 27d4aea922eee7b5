"""An algorithm and a table that do not go together are refused before any process starts."""

import tomllib

import pytest

from troupe.common.config import config_from_dict, load_config, load_layers, to_toml
from troupe.common.config.explain import explain, show_toml
from troupe.common.config.loading import read_config
from troupe.common.data.table_config import TableConfig, parse_table, table_meanings
from troupe.common.errors import ConfigError


@pytest.mark.parametrize(
    ("preset", "fields", "says"),
    [
        ("cartpole-impala", {"replay.tables": "[]"}, "impala learns from a queue table"),
        (
            "cartpole-apex",
            {"replay.tables": '[{limiter = "queue", capacity = 900}]'},
            "from a prioritized table",
        ),
        (
            "cartpole-impala",
            {"replay.tables": '[{name = "rollouts", limiter = "queue", capacity = 64}]'},
            "no table `default`",
        ),
        (
            "cartpole-impala",
            {"replay.tables": '[{limiter = "queue", max_times_sampled = 2, capacity = 64}]'},
            "may learn 1 time",
        ),
        (
            "minatar-seaquest-elite",
            {"replay.tables": '[{name = "again", sampler = "uniform", strategy = "spread"}]'},
            r"'again': strategy has no effect, because it is for sampler elite or attentive",
        ),
        ("cartpole-impala", {"replay.batch_size": "9"}, "a batch of each shard, 9 x 1 items, not 8"),
        ("cartpole-impala", {"replay.shards": "2"}, "a batch of each shard, 8 x 2 items, not 8"),
    ],
)
def test_what_does_not_fit_is_refused(preset, fields, says):
    with pytest.raises(ConfigError, match=says):
        load_config(preset, overrides=fields)


@pytest.mark.parametrize(
    ("preset", "fields", "says"),
    [
        (
            "cartpole-apex",
            {"replay.batch_size": "100000"},
            "(100000) should not exceed replay.capacity_items",
        ),
        ("cartpole-ppo", {"replay.priority_exponent": "0.4"}, "its own priority_exponent"),
        ("cartpole-ppo", {"replay.samples_per_insert": "3"}, "its own samples_per_insert"),
        ("cartpole-ppo", {"replay.min_items": "5000"}, "its own min_items"),
        (
            "cartpole-ppo",
            {"replay.capacity_items": "64"},
            "replay.capacity_items (command line) would have no effect",
        ),
        ("cartpole-ppo", {"replay.importance_exponent": "1"}, "a queue has no importance weights"),
    ],
)
def test_a_field_that_would_do_nothing_or_too_much_is_refused(preset, fields, says):
    with pytest.raises(ConfigError) as error:
        load_config(preset, overrides=fields)
    assert says in str(error.value)


def test_a_preset_with_tables_has_no_other_values_for_them(tmp_path):
    text = "[env]\nid = 'gym:CartPole-v1'\n[replay]\nmin_items = 7\ntables = [{}]\n"
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"replay.min_items \(preset .*own.toml\) would have no effect"):
        load_config(str(tmp_path / "own.toml"))


def test_a_file_may_be_complete(tmp_path):
    # What is at its default there was not chosen.
    (tmp_path / "all.toml").write_text(to_toml(load_config("cartpole-ppo")))
    load_config("cartpole-ppo", tmp_path / "all.toml")
    load_config(str(tmp_path / "all.toml"))


def test_the_table_that_an_error_names_is_accepted():
    queue = {"replay.batch_size": "100", "replay.shards": "2"}
    with pytest.raises(ConfigError) as error:
        load_config("cartpole-impala", overrides={**queue, "replay.tables": "[]"})
    named = str(error.value).partition("set replay.tables to ")[2].partition(", or the like")[0]
    load_config("cartpole-impala", overrides={**queue, "replay.tables": named})


def test_the_replay_server_which_does_not_know_the_algorithm_takes_any_table():
    values = load_config("cartpole-impala").to_dict()
    values["replay"]["tables"] = [{"name": "rollouts", "limiter": "queue", "capacity": 1}]
    assert config_from_dict(values, typed_agent=False).replay.table("rollouts") is not None


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ("{capacity = 9}", "replay.tables (command line): should be an array of tables"),
        ("9", "should be an array of tables, [[replay.tables]] in a file"),
        (
            '["default:queue,capacity=8"]',
            'replay.tables.0 = "default:queue,capacity=8" (command line): should be',
        ),
        (
            "[{capasity = 9}]",
            "replay.tables.0 (command line): table 'default' has no field 'capasity'; nearest: cap",
        ),
        (
            "[{}, {name = 'x', sampler = 'unifrom'}]",
            "replay.tables.1 (command line): table 'x': sampler = 'unifrom'",
        ),
        ("[{sampler = 'unifrom'}]", "nearest: uniform"),
        ("[{capacity = '9'}]", "capacity = '9' should be a whole number"),
        ("[{capacity = true}]", "capacity = 'True' should be a whole number"),
        ("[{capacity = 9.5}]", "capacity = '9.5' should be a whole number"),
        ("[{capacity = 9000000000000000000000}]", "should be a whole number"),
        ("[{name = 3}]", "name = '3' should be a text"),
        ("[{when_full = 'keep_latest'}]", "when_full is for a queue"),
        ("[{limiter = 'queue', when_full = 'keep_latst'}]", "nearest: keep_latest"),
        ("[{limiter = 'queue', when_full = 'alternate', remover = 'lifo'}]", "leave the remover out"),
        ("[{min_items = 2, capacity = 1}]", "min_items (2) should be from 1 to the capacity (1)"),
        ("[{}, {}]", "table 'default' is defined twice"),
    ],
)
def test_wrong_tables_are_one_line_that_names_the_place_and_the_nearest(tables, says):
    with pytest.raises(ConfigError) as error:
        load_config("cartpole-apex", overrides={"replay.tables": tables})
    assert says in str(error.value)
    assert "\n" not in str(error.value)


SEVERAL = """
[[replay.tables]]
capacity = 5000
samples_per_insert = 4

[[replay.tables]]
name = "rollouts"
limiter = "queue"
capacity = 100
min_items = 10
"""


def test_a_file_and_the_command_line_describe_the_same_tables(tmp_path):
    (tmp_path / "own.toml").write_text(SEVERAL)
    config = load_config("cartpole-apex", tmp_path / "own.toml")
    told = (
        parse_table("default:capacity=5000,samples_per_insert=4"),
        parse_table("rollouts:limiter=queue,capacity=100,min_items=10"),
    )
    assert config.replay.tables == told
    assert told[1].sampler == "fifo"
    assert told[1].max_times_sampled == 1
    # What a run directory and a WELCOME keep comes back as it was.
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert (tmp_path / "config.toml").read_text().count("[[replay.tables]]") == 2
    assert read_config(tmp_path / "config.toml") == config
    assert config_from_dict(config.to_dict()) == config
    shown = show_toml(load_layers("cartpole-apex", tmp_path / "own.toml"))
    assert [table["name"] for table in tomllib.loads(shown)["replay"]["tables"]] == ["default", "rollouts"]


def test_shards_share_capacities_and_batches_choose_the_error(tmp_path):
    (tmp_path / "own.toml").write_text(SEVERAL)
    replay = load_config("cartpole-apex", tmp_path / "own.toml", {"replay.shards": "3"}).replay
    first, second = replay.shard_tables(3)
    assert (first.capacity, first.min_items, second.capacity, second.min_items) == (1667, 1, 34, 4)
    assert first.samples_per_insert_error == max(8.0 * replay.batch_size, 800.0)
    assert replay.table("rollouts").capacity == 100


def test_every_field_of_a_table_is_explained():
    text = explain("replay.tables")
    assert "[[replay.tables]]" in text
    for name in vars(TableConfig()):
        assert f"\n    {name} (" in text
        assert table_meanings()[name][1] in text


def test_explain_names_the_nearest_algorithm_or_section():
    for typed, meant in (("policy_gradiant", "policy_gradient"), ("replya", "replay")):
        with pytest.raises(ConfigError, match=f"unknown field '{typed}'; nearest: {meant}$"):
            explain(typed)


def fields_of(batch_size, *tables, **more):
    """Overrides for a run of these tables, each `name: further fields`."""
    entries = ", ".join(
        f'{{name = "{table.partition(":")[0]}", {table.partition(":")[2]}}}' for table in tables
    )
    return {"replay.batch_size": str(batch_size), "replay.tables": f"[{entries}]", **more}


FRESH = 'fresh: limiter = "queue", capacity = 16, share = 4'
AGAIN = 'again: sampler = "uniform", capacity = 500, min_items = 8, share = 4'


def test_shares_say_which_tables_a_batch_is_from():
    replay = load_config(
        "cartpole-impala", overrides=fields_of(8, FRESH, AGAIN, "others: capacity = 9")
    ).replay
    assert replay.shares() == {"fresh": 4, "again": 4}
    assert [table.name for table in replay.sampled_tables(2)] == ["fresh", "again"]
    assert load_config("cartpole-impala").replay.shares() == {"default": 8}
    assert load_config("cartpole-apex").replay.shares() == {"default": 128}


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("cartpole-impala", fields_of(8, FRESH, AGAIN)),
        ("cartpole-impala", fields_of(8, AGAIN, FRESH, **{"replay.shards": "2"})),
        (
            "cartpole-impala",
            fields_of(
                8, FRESH + ', when_full = "keep_latest"', AGAIN.replace("min_items = 8", "min_items = 400")
            ),
        ),
        ("cartpole-ppo", fields_of(8, FRESH, AGAIN, **{"agent.max_staleness": "none"})),
        (
            "cartpole-apex",
            fields_of(64, "a: share = 60, samples_per_insert = 30", "b: sampler = 'lifo', share = 4"),
        ),
        (
            "memory-r2d2",
            fields_of(
                9,
                "a: share = 6, samples_per_insert = 2, min_items = 7",
                "b: share = 3, samples_per_insert = 1, min_items = 7",
            ),
        ),
    ],
)
def test_mixtures_that_make_sense(preset, fields, tmp_path):
    config = load_config(preset, overrides=fields)
    assert sum(config.replay.shares().values())
    # Of the preset's own table nothing is left for the services of the run to refuse.
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(None, tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("preset", "fields", "says"),
    [
        ("cartpole-impala", fields_of(9, FRESH, AGAIN), "add up to 8 rows, but replay.batch_size is 9"),
        ("cartpole-impala", fields_of(4, AGAIN), "impala learns from a queue table"),
        (
            "cartpole-impala",
            fields_of(8, FRESH, FRESH.replace("fresh", "two")),
            "`fresh` and `two` would both",
        ),
        ("cartpole-impala", fields_of(8, FRESH, AGAIN, **{"replay.shards": "5"}), "4 x 5 items, not 16"),
        ("cartpole-pqn", fields_of(8, FRESH, AGAIN), "pqn learns from fresh unrolls only"),
        ("cartpole-impala", {"agent.trust_region": "0.3"}, "agent.trust_region is for replayed rows"),
        (
            "cartpole-ppo",
            fields_of(4, FRESH + ', when_full = "keep_latest"'),
            "waits for every unroll, but when_full of `fresh` drops some",
        ),
        ("cartpole-ppo", fields_of(8, FRESH, AGAIN), "policy_gradient keeps to agent.max_staleness = 0"),
        (
            "cartpole-apex",
            fields_of(8, FRESH, AGAIN),
            "apex learns from a prioritized table: take the share from",
        ),
        (
            "cartpole-impala",
            fields_of(8, FRESH, AGAIN.replace("min_items = 8", "min_items = 17")),
            "`again` in replay.tables waits for 17 items (of each shard), but every unroll",
        ),
        (
            "cartpole-impala",
            fields_of(8, FRESH, AGAIN + ", samples_per_insert = 1"),
            "an item of `again` is sampled 1 times",
        ),
        (
            "cartpole-apex",
            fields_of(9, "a: share = 6, samples_per_insert = 2", "b: share = 3, samples_per_insert = 2"),
            "items of `b` sampled 1 times",
        ),
        (
            "cartpole-apex",
            fields_of(9, "a: share = 6, samples_per_insert = 2", "b: share = 3, min_items = 50"),
            "set min_items of `a` to 50",
        ),
        (
            "cartpole-apex",
            fields_of(9, "a: share = 9, capacity = 5"),
            "share (9) should be from 0 to the capacity (5)",
        ),
        (
            "cartpole-apex",
            fields_of(9, "a: share = 9, samples_per_insert = 1, samples_per_insert_error = 4"),
            "samples_per_insert_error (4) of `a`",
        ),
    ],
)
def test_a_mixture_that_cannot_be_or_would_wait_for_ever_is_refused(preset, fields, says):
    with pytest.raises(ConfigError) as error:
        load_config(preset, overrides=fields)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_server_by_itself_has_no_shares():
    with pytest.raises(ConfigError, match=r"table 'a': share is for \[\[replay.tables\]\] of a run"):
        parse_table("a:share=3")


def test_what_goes_by_features_needs_an_agent_that_stores_them():
    replay = "replay.tables"
    tables = '[{{name = "a", limiter = "queue", capacity = 4, share = 4}}, {{name = "b", share = 4, {}}}]'
    for chooser in ('sampler = "elite"', 'sampler = "attentive"', 'remover = "elite"'):
        overrides = {replay: tables.format(chooser)}
        with pytest.raises(ConfigError, match=r"`b` in replay.tables goes by features.*behaviour_features"):
            load_config("cartpole-impala", overrides=overrides)
        load_config("cartpole-impala", overrides=overrides | {"agent.behaviour_features": "head"})


@pytest.mark.parametrize(
    ("fields", "used"),
    [
        ({}, True),
        ({"priority_exponent": 0.0}, False),
        ({"priority_exponent": 0.0, "remover": "lowest"}, True),
        ({"priority_exponent": 0.0, "remover": "soft"}, False),
        ({"sampler": "uniform"}, False),
        ({"sampler": "uniform", "remover": "prioritized"}, True),
        ({"sampler": "max_heap"}, True),
        ({"sampler": "elite"}, True),
    ],
)
def test_priorities_are_used_where_a_choice_depends_on_them(fields, used):
    assert TableConfig(**fields).uses_priorities == used
