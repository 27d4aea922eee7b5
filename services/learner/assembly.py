"""The parts that a learner serves others by, made as the configuration of the run says; not bound yet."""

from __future__ import annotations

import numpy as np

from troupe.common.agents import Agent, make_agent
from troupe.common.config import Config, structural_hash
from troupe.common.data.schema import stored_as
from troupe.common.envs import EnvSpec
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.replay.codec import specs_to_wire
from troupe.common.wire.replay.sharded import ShardedReplayClient
from troupe.common.wire.sockets import Context, Security
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.epochs import Epochs
from troupe.services.learner.control.evaluations import Evaluations
from troupe.services.learner.control.requests import Terms
from troupe.services.learner.control.server import ControlServer
from troupe.services.learner.control.slots import SlotRules
from troupe.services.learner.inference.service import CentralInference

PEERS_START_S = 60.0
"""How long a run waits for the other learners that it begins with."""


def control_server(
    context: Context, config: Config, agent: Agent, run: str, budget: StepBudget, security: Security
) -> ControlServer:
    """The server of the membership of `run`, whose steps `budget` counts."""
    net = config.net
    return ControlServer(
        context,
        net.control,
        net.announce,
        Terms(
            config.to_dict(),
            structural_hash(config),
            run=run,
            heartbeat_s=net.heartbeat_s,
            liveness_s=net.liveness_s,
            fields=specs_to_wire(stored_as(config.replay.compression, agent.fields)),
            item_steps=agent.item_steps,
        ),
        # With a total of its own, actors come and go; without, as many are expected as fill it.
        SlotRules(
            config.total_slots,
            spread=config.actor.total_slots > 0,
            max_per_key=config.actor.max_slots_per_key,
        ),
        shard_sockets=net.replay,
        bfloat16=config.learner.publish_dtype == "bfloat16",
        security=security,
        budget=budget,
        evaluations=Evaluations(*config.evaluator.division()),
        epochs=Epochs(
            config.agent.one_learner_because, expected=config.learner.processes, start_s=PEERS_START_S
        ),
    )


def central_inference(
    context: Context, config: Config, spec: EnvSpec, control: ControlServer, steps: int, security: Security
) -> CentralInference:
    """What acts for the actors from step number `steps` on.

    It has a network of its own: updates change the other one.
    """
    # With the steps: a resumed run would otherwise explore by the very draws of its beginning.
    seed = np.random.SeedSequence([config.run.seed, steps]).generate_state(1)[0]
    agent = make_agent(config.agent, spec, seed=config.run.seed, device=config.learner.device)
    return CentralInference(
        context,
        config,
        agent,
        spec,
        leases=control.leases,
        shards=control.shards,
        replay=ShardedReplayClient(
            ctx=context,
            name="inference",
            incarnation=new_incarnation(),
            specs=stored_as(config.replay.compression, agent.fields),
            max_outstanding=max(1, config.actor.max_outstanding_inserts // config.replay.shards),
            security=security,
            tolerate_refusals=True,
        ),
        seed=int(seed),
        security=security,
    )
