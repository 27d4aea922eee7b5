"""What runs of a plan are configured as."""

from __future__ import annotations

from typing import Any

from tests.simulation.learners import ANNOUNCE, CONTROL, INFERENCE
from tests.simulation.plan import Plan
from tests.simulation.stores import NETWORK
from troupe.common.config import Config, load_config

BATCH = 4
EPISODES = 3
"""Games of an evaluation."""

TABLES: dict[str, dict[str, Any]] = {
    "plenty": {"capacity_items": 4000, "min_items": 4, "samples_per_insert": 0.0},
    "small": {"capacity_items": 24, "min_items": 4, "samples_per_insert": 0.0},
    "ratio": {
        "capacity_items": 4000,
        "min_items": 8,
        "samples_per_insert": 4.0,
        "samples_per_insert_error": 32.0,
    },
    "queue": {"tables": [{"name": "default", "limiter": "queue", "capacity": 16}]},
}

_CONFIGS: dict[Any, Config] = {}


def make_config(plan: Plan) -> Config:
    key = (
        *(plan.table, plan.slots, plan.shards, plan.total_steps, plan.evaluators, plan.central),
        *(plan.durable, plan.learners, plan.actors),
    )
    if key not in _CONFIGS:
        replay = {f"replay.{name}": value for name, value in TABLES[plan.table].items()}
        _CONFIGS[key] = load_config(
            "cartpole-impala" if plan.table == "queue" else "cartpole-apex",
            None,
            {
                "run.total_steps": plan.total_steps,
                "run.seed": 1,
                "replay.batch_size": BATCH,
                "replay.max_bytes": 1 << 20,
                "replay.durable": plan.durable,
                "replay.shards": plan.shards,
                "actor.processes": plan.actors,
                "actor.slots": plan.slots,
                "actor.params_period_steps": 1,
                "net.heartbeat_s": 1.0,
                "net.liveness_s": 4.0,
                "inference.mode": "central" if plan.central else "local",
                "net.control": CONTROL,
                "net.announce": ANNOUNCE,
                "net.inference": INFERENCE,
                "evaluator.enabled": plan.evaluators > 0,
                "evaluator.processes": max(1, plan.evaluators),
                "evaluator.episodes": EPISODES,
                "evaluator.slots": 2,
                "evaluator.period_s": 2.0,
                "evaluator.timeout_s": 20.0,
                "evaluator.video": False,
                "learner.processes": plan.learners,
                "learner.prefetch": 2,
                "learner.publish_period_updates": 5,
                "learner.checkpoint_period_s": 4.0,
                "net.learner_network": NETWORK if plan.learners > 1 else "",
                **replay,
            },
            {},
        )
    return _CONFIGS[key]
