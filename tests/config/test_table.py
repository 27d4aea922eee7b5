"""An algorithm and a table that do not go together are refused before any process starts."""

import pytest

from common.config import config_from_dict, load_config
from common.errors import ConfigError


@pytest.mark.parametrize(
    ("preset", "fields", "says"),
    [
        ("cartpole-impala", {"replay.tables": "[]"}, "impala learns from a queue table"),
        ("cartpole-apex", {"replay.tables": '["default:queue,capacity=900"]'}, "from a prioritized table"),
        ("cartpole-impala", {"replay.tables": '["rollouts:queue,capacity=64"]'}, "no table `default`"),
        (
            "cartpole-impala",
            {"replay.tables": '["default:queue,max_times_sampled=2,capacity=64"]'},
            "may learn 1 time",
        ),
        ("cartpole-impala", {"replay.batch_size": "65"}, "a batch of each shard, 65 x 1 items, not 64"),
        ("cartpole-impala", {"replay.shards": "9"}, "a batch of each shard, 8 x 9 items, not 64"),
    ],
)
def test_what_does_not_fit_is_refused(preset, fields, says):
    with pytest.raises(ConfigError, match=says):
        load_config(preset, overrides=fields)


def test_the_table_that_an_error_names_is_accepted():
    queue = {"replay.batch_size": "100", "replay.shards": "2"}
    with pytest.raises(ConfigError) as error:
        load_config("cartpole-impala", overrides={**queue, "replay.tables": "[]"})
    named = str(error.value).partition("set replay.tables to ")[2].partition(", or the like")[0]
    load_config("cartpole-impala", overrides={**queue, "replay.tables": named})


def test_the_replay_server_which_does_not_know_the_algorithm_takes_any_table():
    values = load_config("cartpole-impala").to_dict()
    values["replay"]["tables"] = ["rollouts:queue,capacity=1"]
    assert config_from_dict(values, typed_agent=False).replay.table("rollouts") is not None
