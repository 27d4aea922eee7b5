"""What a seed runs: a small run, its services, and when what goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

USUAL = (
    *("kill", "torn", "stop", "replace", "stall", "slow_reader", "clock"),
    *("partition", "one_way", "isolate", "reset", "forget", "slow", "garbage"),
)
KINDS = (*USUAL, "power_cut")
POWER = 0.15
"""The share of runs whose shards survive power cuts, and have some; likewise of the learner."""

IN_SYNC = -1
"""The amount of a power cut that waits for the next sync."""

COMMIT = "commit"
"""The other of a tear that comes so many lines after a chunk begins to exist."""
COMMIT_LINES = 74
"""So many lines an insert has from there on; before that are nearly 400."""

UPDATE = "update"
"""The other of a kill of a learner that waits for its next update, and for the last message of that."""

PARTING = ("stall", "slow_reader", "partition", "one_way", "isolate", "reset", "forget", "slow")
"""After these a process that is alive may be taken for one that is not."""
QUIET_S = 3.0
"""Nothing goes wrong before, for services join; those that join under faults are the restarted ones."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at_s: when.
        kind: one of `KINDS`.
        target: the process, or empty.
        other: another one, where two are concerned, or `COMMIT` or `UPDATE`.
        amount: seconds, or a share, as the kind says.
    """

    at_s: float
    kind: str
    target: str = ""
    other: str = ""
    amount: float = 0.0

    def __str__(self) -> str:
        between = f"{self.target}-{self.other}" if self.other else self.target
        return f"{self.at_s:.2f} {self.kind} {between} {self.amount:.3g}".strip()


@dataclass(frozen=True)
class Plan:
    """A run and its faults.

    Attributes:
        seed: of everything else that happens by chance.
        table: `plenty` (it never runs over), `small` (the oldest leave), `ratio` (samples per insert are
            limited) or `queue`.
        actors: processes.
        slots: of each.
        shards: of replay.
        evaluators: processes.
        total_steps: of the run.
        step_s: what a step of an actor takes, on average.
        update_s: what an update of the learner takes, on average.
        central: the learner acts for the actors.
        shared_host: learner and shards are on one host, and batches are read from files.
        durable: what acknowledged items survive, as `replay.durable` says.
        learners: processes that share each batch, of which one has the run.
        faults: in the order of time.
    """

    seed: int
    table: str
    actors: int
    slots: int
    shards: int
    evaluators: int
    total_steps: int
    step_s: float
    update_s: float
    central: bool
    shared_host: bool
    durable: str = "process"
    learners: int = 1
    faults: tuple[Fault, ...] = field(default=())

    @property
    def end_s(self) -> float:
        """When the last fault is over."""
        lasting = ("stall", "slow_reader", "partition", "one_way", "isolate", "slow")
        return max((f.at_s + (f.amount if f.kind in lasting else 0.0) for f in self.faults), default=0.0)

    def without(self, faults: set[int]) -> Plan:
        """The same without some of the faults, by place."""
        return replace(self, faults=tuple(f for i, f in enumerate(self.faults) if i not in faults))

    def services(self) -> list[str]:
        """Their names."""
        return [
            *self.learner_names(),
            *(f"replay-{i}" for i in range(self.shards)),
            *(f"actor-{i}" for i in range(self.actors)),
            *(f"evaluator-{i}" for i in range(self.evaluators)),
        ]

    def learner_names(self) -> list[str]:
        """Of those that share batches, the owner first."""
        return ["learner", *(f"learner-{i}" for i in range(1, self.learners))]


def make_plan(seed: int) -> Plan:
    """What a seed runs."""
    rng = random.Random(f"plan {seed}")
    actors, slots, step_s = rng.randint(1, 3), rng.randint(1, 3), rng.choice((0.25, 0.5, 1.5))
    plan = Plan(
        seed=seed,
        table=rng.choice(("plenty", "small", "ratio", "queue")),
        actors=actors,
        slots=slots,
        shards=rng.choice((1, 1, 2)),
        evaluators=rng.choice((0, 0, 1, 2)),
        total_steps=max(64, round(actors * slots * rng.uniform(8, 18) / step_s)),
        step_s=step_s,
        update_s=rng.choice((0.1, 0.2, 0.4)),
        central=rng.random() < 0.25,
        shared_host=rng.random() < 0.5,
    )
    count = rng.choice((0, 1, 2, 3, 4, 6, 8))
    faults = [_fault(rng, plan) for _ in range(count)]
    power = random.Random(f"power {seed}")
    if power.random() < POWER:
        plan = replace(plan, durable="power")
        faults += [_power_cut(power, plan) for _ in range(power.choice((1, 1, 2, 3)))]
    plan = replace(plan, faults=tuple(sorted(faults, key=lambda each: each.at_s)))
    return _with_cut_learner(_with_deaths_in_updates(_with_learners(_with_late_tears(plan))))


def _with_deaths_in_updates(plan: Plan) -> Plan:
    """Have half of three learners' kills come where one of the others may have the last message already."""
    rng = random.Random(f"updates {plan.seed}")

    def within(fault: Fault) -> Fault:
        if plan.learners < 3 or fault.kind != "kill" or not fault.target.startswith("learner"):
            return fault
        return fault if rng.random() < 0.5 else replace(fault, other=UPDATE)

    return replace(plan, faults=tuple(map(within, plan.faults)))


def _with_cut_learner(plan: Plan) -> Plan:
    """Cut the power of the learner in some plans; not beside shards that do not survive it."""
    rng = random.Random(f"learner's power {plan.seed}")
    if rng.random() >= POWER or (plan.shared_host and plan.durable != "power"):
        return plan
    faults = [*plan.faults]
    for _ in range(rng.choice((1, 1, 2))):
        # At once, or after so much that its disk has done: a checkpoint takes a dozen.
        at_s, amount = QUIET_S + 17.0 * rng.random(), float(rng.choice((0, *(rng.randrange(1, 40),) * 3)))
        faults.append(Fault(at_s, "power_cut", "learner", amount=amount))
    return replace(plan, faults=tuple(sorted(faults, key=lambda each: each.at_s)))


def _with_late_tears(plan: Plan) -> Plan:
    """Have half of the tears come when a chunk is nearly stored: by chance one of ten would."""
    rng = random.Random(f"tears {plan.seed}")

    def late(fault: Fault) -> Fault:
        if fault.kind != "torn" or rng.random() < 0.5:
            return fault
        return replace(fault, other=COMMIT, amount=float(rng.randrange(1, COMMIT_LINES)))

    return replace(plan, faults=tuple(map(late, plan.faults)))


def _power_cut(rng: random.Random, plan: Plan) -> Fault:
    """Of a shard's host: at once, at some line of a change of the shard's files, or while they are synced."""
    at_s, target = QUIET_S + 17.0 * rng.random(), f"replay-{rng.randrange(plan.shards)}"
    return Fault(at_s, "power_cut", target, amount=float(rng.choice((0, IN_SYNC, rng.randrange(1, 400)))))


def _with_learners(plan: Plan) -> Plan:
    """Some plans have several learners, whose faults come beside the others'; a half of these only kills.

    Drawn by a generator of their own: the rest of a plan is what it was before there were several.
    """
    rng = random.Random(f"learners {plan.seed}")
    learners = rng.choice((1, 1, 1, 1, 1, 1, 2, 3))
    if learners == 1:
        return plan
    plan = replace(plan, learners=learners)
    kinds = ("kill", "stop") if rng.random() < 0.5 else USUAL
    faults = [fault for fault in plan.faults if fault.kind not in PARTING or len(kinds) > 2]
    if learners == 3 and len(kinds) > 2 and rng.random() < 0.3:
        # At the end of an epoch without the owner, at that which is met at: it accepts, and answers nothing.
        at_s = QUIET_S + 17.0 * rng.random()
        faults.append(Fault(at_s, "kill", "learner", amount=60.0))
        faults.append(
            Fault(at_s + 2.0 * rng.random(), "stall", "learner-1", amount=50.0 + 20.0 * rng.random())
        )
    for _ in range(rng.choice((0, 1, 1, 2, 3, 4))):
        faults.append(_learner_fault(rng, plan, kinds))
    return replace(plan, faults=tuple(sorted(faults, key=lambda each: each.at_s)))


def _learner_fault(rng: random.Random, plan: Plan, kinds: tuple[str, ...]) -> Fault:
    names = plan.learner_names()
    choices = ("kill", "kill", "stop", "stall", "isolate", "partition", "one_way", "reset")
    kind = rng.choice([each for each in choices if each in kinds])
    at_s, target = QUIET_S + 17.0 * rng.random(), rng.choice(names)
    long_s = rng.choice((0.3, 1.0, 4.0, 8.0)) * (0.5 + rng.random())
    if kind == "stop":  # the owner's end is the run's
        return Fault(at_s, kind, rng.choice(names[1:]))
    if kind in ("partition", "one_way"):
        return Fault(at_s, kind, target, rng.choice([each for each in names if each != target]), long_s)
    if kind == "reset":
        return Fault(at_s, kind, amount=rng.choice((0.3, 1.0)))
    return Fault(at_s, kind, target, amount=long_s)


def _fault(rng: random.Random, plan: Plan) -> Fault:
    services = plan.services()
    kind = rng.choice(USUAL)
    at_s = QUIET_S + 17.0 * rng.random()
    target = rng.choice(services)
    other = rng.choice([each for each in services if each != target])
    long_s = rng.choice((0.3, 1.0, 4.0, 8.0)) * (0.5 + rng.random())
    if kind == "kill":
        return Fault(at_s, kind, target, amount=rng.choice((0.05, 0.5, 2.0, 5.0)) * (0.5 + rng.random()))
    if kind == "torn":  # killed at some line of a change of its files; inserts have the most
        shard = rng.choice([each for each in services if each.startswith("replay")])
        return Fault(at_s, kind, shard, amount=float(rng.randrange(1, 400)))
    if kind in (
        "stop",
        "replace",
    ):  # a signal, as where a machine is taken; or another machine for one that died
        return Fault(
            at_s, kind, rng.choice([each for each in services if each.startswith(("actor", "evaluator"))])
        )
    if kind in ("stall", "slow_reader", "isolate"):
        return Fault(at_s, kind, target, amount=long_s)
    if kind in ("partition", "one_way"):
        return Fault(at_s, kind, target, other, long_s)
    if kind == "slow":
        return Fault(at_s, kind, amount=long_s)
    if kind == "clock":
        return Fault(at_s, kind, target, amount=rng.choice((-1, 1)) * rng.choice((1.0, 60.0, 7200.0)))
    if kind == "garbage":
        return Fault(
            at_s, kind, rng.choice([each for each in services if each.startswith(("learner", "replay"))])
        )
    return Fault(at_s, kind, amount=rng.choice((0.3, 1.0)))
