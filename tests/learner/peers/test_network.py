"""Where learners may meet, and what each of them takes of a batch."""

import pytest

from troupe.common.config import load_config
from troupe.common.errors import ConfigError
from troupe.services.learner.peers.network import check_machine, check_meeting, own_address
from troupe.services.learner.peers.shares import part_of


def test_without_a_private_network_learners_meet_on_loopback_only():
    assert own_address("") == "127.0.0.1"
    check_meeting("127.0.0.1", "")
    with pytest.raises(ConfigError, match="gradients are not encrypted"):
        check_meeting("10.0.0.7", "")


def test_with_one_they_meet_in_it_only():
    assert own_address("127.0.0.0/8").startswith("127.")
    check_meeting("10.0.0.7", "10.0.0.0/16")
    with pytest.raises(ConfigError, match="in the private network"):
        check_meeting("10.1.0.7", "10.0.0.0/16")
    with pytest.raises(ConfigError, match="this machine has no address"):
        own_address("203.0.113.0/24")


def test_a_learner_of_another_machine_is_joined_in_a_private_network_only():
    for here in ("tcp://127.0.0.1:5550", "tcp://localhost:5550", "tcp://[::1]:5550", "ipc:///run/control"):
        check_machine(here, "")
    check_machine("tcp://203.0.113.7:5550", "203.0.113.0/24")
    with pytest.raises(ConfigError, match="on another machine"):
        check_machine("tcp://203.0.113.7:5550", "")


def test_a_network_of_public_addresses_is_refused():
    with pytest.raises(ConfigError, match="public network"):
        load_config("cartpole-ppo", None, {"net.learner_network": "8.8.0.0/16"}, {})


def test_learners_that_cannot_share_batches_are_refused_before_a_run():
    vmpo = {"learner.processes": "2", "agent.policy_loss": "vmpo"}
    with pytest.raises(ConfigError, match="vmpo weighs each step"):
        load_config("cartpole-ppo", None, vmpo, {})
    with pytest.raises(ConfigError, match="to divide"):
        load_config("cartpole-ppo", None, {"learner.processes": "1000"}, {})


@pytest.mark.parametrize("learners", [1, 2, 3, 7, 40])
def test_parts_of_learners_add_up_to_the_batch(learners):
    shares = {"fresh": 16, "again": 5}
    parts = [part_of(shares, rank, learners) for rank in range(learners)]
    for table, rows in shares.items():
        found = [part.get(table, 0) for part in parts]
        assert sum(found) == rows
        assert max(found) - min(found) <= 1
