"""Acting and learning in one process, through a queue: what the services do, without them."""

from collections import deque

import numpy as np

from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.envs import make_vector
from troupe.services.actor.local_inference import Rollout
from troupe.services.evaluator.games import play


def stacked_fields(chunks):
    """Items that cover their chunks, as a sampled batch `[B, window, ...]`."""
    return {name: np.stack([chunk.fields[name] for chunk in chunks]) for name in chunks[0].fields}


def learn_through_a_queue(agent_config, env_config, *, slots, batch, steps, seed, lag=0):
    """Trains for `steps` steps; every unroll is learned from once, in order.

    `lag` is how many updates the actors' parameters stay behind for. Returns the learner's agent.
    """
    env = make_vector(env_config, slots, seed)
    learner = make_agent(agent_config, env.spec, seed=seed)
    actor = make_agent(agent_config, env.spec, seed=seed + 1)
    versions = deque([learner_params(learner)], maxlen=lag + 1)
    actor.load_params(versions[0])
    rollout, queue, history = Rollout(actor, env, 0, seed), deque(), []
    rollout.explore(list(range(slots)), slots)
    while rollout.timing.steps < steps:
        queue.extend(rollout.step(0))
        while len(queue) >= batch:
            fields = stacked_fields([queue.popleft() for _ in range(batch)])
            progress = rollout.timing.steps / steps
            update = learner.update(
                Batch(fields, np.ones(batch, np.float32), measure=False, progress=progress)
            )
            assert update.priorities is None
            versions.append(learner_params(learner))
            actor.load_params(versions[0])
        history += rollout.episodes
        rollout.episodes.clear()
    env.close()
    return learner, history


def learner_params(agent):
    return {name: array.copy() for name, array in agent.params().items()}


def evaluate(agent, env_config, episodes=20, epsilon=None):
    epsilon = agent.eval_epsilon if epsilon is None else epsilon
    most = env_config.max_episode_frames
    result = play(
        agent, env_config, episodes=episodes, slots=10, seed=99, epsilon=epsilon, max_episode_frames=most
    )
    return result.mean_return
