"""Acting and learning in one process, by prioritized replay of items of any length."""

import numpy as np

from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.hindsight import hindsight_of
from troupe.common.envs import make_vector
from troupe.common.rl.importance import annealed, importance_weights
from troupe.services.actor.local_inference import Rollout


def windows(chunks, fields):
    """Every item of the chunks: its fields, its length and its priority."""
    items = []
    for chunk in chunks:
        for offset, length, priority in zip(chunk.offsets, chunk.lengths, chunk.priorities, strict=True):
            cut = {f.name: chunk.fields[f.name][offset : offset + f.entries(length)] for f in fields}
            items.append((cut, int(length), float(priority)))
    return items


def batch_of(items):
    """Items as replay hands them out: short windows repeat their last entry. Fields and lengths."""
    lengths = np.array([length for _, length, _ in items], np.int32)
    fields = {}
    for name in items[0][0]:
        rows = [cut[name] for cut, _, _ in items]
        longest = max(len(row) for row in rows)
        fields[name] = np.stack([row[np.minimum(np.arange(longest), len(row) - 1)] for row in rows])
    return fields, lengths


def learn_by_replay(config, *, updates, seed, slots=None):
    """Trains with a configuration's values for a number of updates. Returns the agent."""
    slots = slots or config.actor.slots
    env = make_vector(config.env, slots, seed)
    agent = make_agent(config.agent, env.spec, seed=seed)
    hindsight = hindsight_of(config, env.spec)
    rollout = Rollout(agent, env, config.actor.chunk_steps, seed, hindsight=hindsight)
    rollout.explore(list(range(slots)), slots)
    rng = np.random.default_rng(seed)
    replay, items, priorities = config.replay, [], np.zeros(0)
    inserted = done = 0
    while done < updates:
        new = windows(rollout.step(done), agent.fields)
        inserted += len(new)
        items = (items + new)[-replay.capacity_items :]
        priorities = np.concatenate([priorities, [item[2] for item in new]])[-replay.capacity_items :]
        while (
            inserted >= replay.min_items
            and done < updates
            and done * replay.batch_size < replay.samples_per_insert * (inserted - replay.min_items + 1)
        ):
            chances = priorities**replay.priority_exponent
            chances = chances / chances.sum()
            beta = annealed(
                replay.importance_exponent,
                replay.importance_exponent_final,
                done,
                replay.importance_anneal_updates,
            )
            rows = rng.choice(len(items), replay.batch_size, p=chances)
            fields, lengths = batch_of([items[row] for row in rows])
            weights = importance_weights(chances[rows], chances.min(), beta)
            update = agent.update(Batch(fields, weights, lengths, progress=done / updates, measure=False))
            priorities[rows] = update.priorities
            done += 1
    env.close()
    return agent, rollout
