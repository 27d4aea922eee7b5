"""A run in AWS between its first machine and its end: looked at every minute, with the actors it needs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from troupe.common.runtime.files import STATUS_FILE, read_status
from troupe.services.cloud.appetite import SETTLE_S, Bounds, Look
from troupe.services.cloud.decisions import End, Known, Limits, actors_to_have, ending, has_moved
from troupe.services.cloud.goal import parse_goal
from troupe.services.cloud.run import CloudRun, utc
from troupe.services.cloud.tools import ToolError


def start(run: CloudRun) -> None:
    """Make everything but machines; when AWS knows when to end them, have it start them. May be begun again.

    Raises:
        ToolError: it fails; `run.record.began_s` says whether there may be machines.
    """
    record = run.record
    hourly = run.costs.with_actors(record.layout.actors)
    run.terraform.init()
    if record.began_s:
        run.say(f"continuing {record.run}: {record.usd:.2f} of {record.budget_usd:.2f} dollars are spent")
    else:
        run.say("Terraform is making the network, bucket and keys")
        record.spent(replace(record.spending, until_s=time.time(), hourly_usd=run.costs.of({})))
    if record.stop_s < time.time():  # never begun, or ended by AWS: no machine before its end is known
        run.terraform.set({"running": False})
    run.tell_aws_when_to_end(run.end_of_budget(hourly))
    if run.stop.requested:
        return
    record.bucket = str(run.terraform.outputs()["bucket"])
    # Noted before the first machine: what crashes in between is counted, and found again.
    record.began_s = record.began_s or time.time()
    record.spent(record.spending.counted(time.time(), hourly))
    run.save()
    run.say(f"machines are starting; AWS ends them at {utc(record.stop_s)}, even without this computer")
    run.terraform.apply(running=True)


def count_absence(run: CloudRun) -> None:
    """Count what it cost while nobody looked: until AWS ended the machines, if it did."""
    record, now_s = run.record, time.time()
    if 0 < record.stop_s < now_s:
        record.spent(record.spending.counted(record.stop_s, record.hourly_usd))
        record.spent(replace(record.spending, hourly_usd=run.costs.of({})))
    record.spent(record.spending.counted(now_s, 0.0))


@dataclass
class _Seen:
    """What looks at a run have told so far.

    Attributes:
        status: the newest of the learner.
        moved_s: when it last made a step, as far as that could be seen.
        looked_s: when it was last looked at.
        looks: see `wanted_actors`.
    """

    moved_s: float
    looked_s: float
    status: dict[str, Any] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)

    def take(self, status: dict[str, Any] | None, now_s: float) -> None:
        """Take in a status; None where the bucket could not be asked."""
        if status is None:
            self.moved_s += now_s - self.looked_s  # nobody knows: it is no sign of a run that stands still
        elif status.get("steps", 0) != self.status.get("steps", 0):
            self.moved_s = now_s
        fresh = status and status.get("wall_s") != self.status.get("wall_s")
        if status and fresh and status.get("updates_since_start", 0) > 0:
            recent = [look for look in self.looks if look.at_s > now_s - 2 * SETTLE_S]
            self.looks = [*recent, look_of(status, now_s)]
        self.status, self.looked_s = status or self.status, now_s


def look_of(status: Mapping[str, Any], now_s: float) -> Look:
    """What a status says of the learner's appetite."""
    metrics = status.get("metrics", {})
    return Look(
        at_s=now_s,
        wait_share=float(metrics.get("learner/wait_share", 0.0)),
        blocked_share=float(metrics.get("actor/insert_blocked_share", 0.0)),
        joined=sum(peer["role"] == "actor" for peer in status.get("peers", ())),
    )


class Keeper:
    """Looks at a run until it ends."""

    def __init__(self, run: CloudRun, *, period_s: float, patience_s: float) -> None:
        """Create.

        Args:
            run: has started.
            period_s: between two looks.
            patience_s: how long it may make no step.
        """
        record, per_machine = run.record, run.record.layout.actors_per_machine
        self._run, self._period_s = run, period_s
        self._limits = Limits(
            budget_usd=record.budget_usd,
            once_usd=run.costs.once_usd,
            goal=parse_goal(record.until, evaluated=record.evaluated) if record.until else None,
            total_steps=record.total_steps,
            patience_s=patience_s,
            actors=Bounds(per_machine, per_machine, record.max_actors),
        )
        now_s = time.time()
        self._seen = _Seen(moved_s=now_s, looked_s=now_s)

    def keep(self) -> End:
        """Look at the run until something ends it; what.

        Raises:
            GivenUpError: the user asks for an end twice.
        """
        while not self._run.stop.requested:
            if found := self.look():
                return found
            self._run.pause(self._period_s, until=lambda: self._run.stop.requested)
        return End("you asked for an end (once more: give up at once)", self._limits.goal is None)

    def look(self) -> End | None:
        """Look once, and change what has to be changed; why it ends, if it does."""
        run, record = self._run, self._run.record
        machines = self._asked(run.aws.machines)
        run.look_at_spending(machines)
        self._seen.take(self._asked(self._status), time.time())
        # Machines that are away may come back, and have to be ended then.
        hourly = max(record.hourly_usd, run.costs.with_actors(record.layout.actors))
        known = Known(
            spending=replace(record.spending, hourly_usd=hourly),
            status=self._seen.status,
            moved_s=self._seen.moved_s,
            actors=record.layout.actors,
            looks=self._seen.looks,
        )
        run.say(self._line(machines))
        if found := ending(self._limits, known):
            return found
        try:
            self._change(actors_to_have(self._limits, known, run.costs.with_actors))
        except ToolError as error:
            run.say(f"the number of actors, or the end of the budget, could not be changed: {error}")
        return None

    def _change(self, actors: int) -> None:
        """Have so many actors, and tell AWS how long the budget lasts with them."""
        run, record = self._run, self._run.record
        if actors == record.layout.actors:
            self._tell_end(run.costs.with_actors(actors))
            return
        now = record.layout.actors
        run.say(
            f"the learner {'waits for' if actors > now else 'is fed by too many'} actors: {now} -> {actors}"
        )
        changed = record.layout.model_copy(update={"actors": actors})
        hourly = run.costs.with_actors(actors)
        if actors > now:  # AWS learns first that the budget ends sooner
            self._tell_end(hourly)
            record.layout = changed
            run.save()
            run.terraform.apply(actors=actors)
        else:
            run.terraform.apply(actors=actors)
            record.layout = changed
            run.save()
            self._tell_end(hourly)
        self._seen.looks = []

    def _tell_end(self, hourly: float) -> None:
        at_s = self._run.end_of_budget(hourly)
        if has_moved(time.time(), self._run.record.stop_s, at_s):
            self._run.tell_aws_when_to_end(at_s)

    def _status(self) -> dict[str, Any]:
        run = self._run
        run.aws.fetch_one(run.record.bucket, STATUS_FILE, run.run_dir / STATUS_FILE)
        return read_status(run.run_dir)

    def _asked(self, question: Any) -> Any:
        try:
            return question()
        except ToolError as error:
            self._run.say(f"AWS does not answer; the run continues: {error}; {self._run.advice}")
            return None

    def _line(self, machines: Mapping[str, int] | None) -> str:
        """What a look found, in a line."""
        record, status = self._run.record, self._seen.status
        metrics = status.get("metrics", {})
        parts = [f"{record.usd:.2f} of {record.budget_usd:.2f} dollars, {record.hourly_usd:.2f} an hour"]
        if machines is not None:
            named = ", ".join(f"{count} {role}" for role, count in sorted(machines.items()))
            parts.append(f"machines: {named or 'none'}")
        if status:
            parts.append(f"{status.get('steps', 0):,} of {record.total_steps:,} steps")
        for name, words in _SHOWN.items():
            if isinstance(value := metrics.get(name), int | float):
                parts.append(words.format(value))
        return " | ".join(parts)


_SHOWN = {
    "speed/steps_per_s": "{:,.0f} a second",
    "eval/episode_return": "return {:.2f}",
    "train/episode_return": "return in training {:.2f}",
    "learner/wait_share": "the learner waits {:.0%}",
}
