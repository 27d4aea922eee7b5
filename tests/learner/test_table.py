"""An algorithm and a table that do not go together are refused before anything is lost."""

import pytest

from common.agents import TableNeeds
from common.config import load_config, preset_names
from common.errors import ConfigError
from services.learner.service import check_table

PRIORITIZED, QUEUE = TableNeeds("prioritized"), TableNeeds("queue", 1)


def config_with(tables):
    return load_config("cartpole-impala", overrides={"replay.tables": tables})


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_the_table_that_it_needs(name):
    config = load_config(name)
    check_table(QUEUE if config.agent.algorithm == "impala" else PRIORITIZED, config)


@pytest.mark.parametrize(
    ("needs", "tables", "says"),
    [
        (QUEUE, "[]", "learns from a queue table"),
        (PRIORITIZED, '["default:queue,capacity=9"]', "learns from a prioritized table"),
        (QUEUE, '["rollouts:queue,capacity=9"]', "no table `default`"),
        (QUEUE, '["default:queue,max_times_sampled=2,capacity=9"]', "may learn 1 time"),
    ],
)
def test_what_does_not_fit_is_refused(needs, tables, says):
    with pytest.raises(ConfigError, match=says):
        check_table(needs, config_with(tables))
