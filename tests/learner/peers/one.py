"""A learner among several, in a process of its own, with rows at random instead of replay."""

import sys
import time
from pathlib import Path

import numpy as np
import torch

from tests.agents.unrolled import SMALL, VECTOR, random_batch
from tests.harness import Context
from tests.learner.peers.clients import state_hash
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.config.algorithms import agent_model
from troupe.common.runtime import StopSignal
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.security.key_options import make_security
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.epochs import Epochs
from troupe.services.learner.control.requests import Terms
from troupe.services.learner.control.server import ControlServer
from troupe.services.learner.control.slots import SlotRules
from troupe.services.learner.peers.seats import GivenSeats, OwnSeats
from troupe.services.learner.peers.team import Rules, Share, Team
from troupe.services.learner.saving.counters import RunCounters

ROWS = 3
UNTIL = 100_000


def main(name, endpoint, expected, directory, network=""):
    """Learn with the others, and write a line `UPDATE HASH LEARNERS SECOND` for each update, until killed.

    The learner that has the run listens at `endpoint`, for others of the machine or of `network`.
    """
    torch.set_num_threads(1)
    context, stop = Context(), StopSignal()
    security = make_security(f"{directory}/keys", "learner") if network else None
    config = agent_model("policy_gradient")(**SMALL, epochs=2, minibatch_steps=10)
    # Seeds differ: what they have alike they have from each other.
    agent = make_agent(config, VECTOR, seed=len(name) + ord(name[-1]))
    rng, counters = np.random.default_rng(ord(name[-1])), RunCounters(1, StepBudget(UNTIL))
    if name == "learner":
        epochs = Epochs(expected=expected, start_s=60.0)
        address, _, port = endpoint.rpartition(":")
        announce = f"{address}:{int(port) + 1}" if network else f"{endpoint}-announce"
        terms, rules = Terms({}, run="a"), SlotRules(1)
        server = ControlServer(context, endpoint, announce, terms, rules, epochs=epochs, security=security)
        server.start()
        seats = OwnSeats(server, network, stop)
    else:
        client = ControlClient(
            context,
            endpoint,
            role="learner",
            name=name,
            incarnation=new_incarnation(),
            security=security,
        )
        client.join(60)
        seats = GivenSeats(client, network, 15.0)
    team = Team(agent, counters, seats, Rules(name == "learner", ROWS * expected, network, 60.0))
    share = None
    with (Path(directory) / f"{name}.log").open("a", buffering=1) as log:
        while True:
            if share is None:
                batch = Batch(random_batch(rng, agent, ROWS), np.ones(ROWS, np.float32))
                share = Share(lambda *wanted, batch=batch: batch, ROWS, 0.0)
            learned = team.learn(share)
            share = None if learned.taken else share
            if learned.moved:
                digest, second = state_hash(agent, counters), time.monotonic()
                log.write(f"{counters.updates} {digest} {team.learners} {second:.3f}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
