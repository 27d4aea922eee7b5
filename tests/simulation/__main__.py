"""Runs seeds, and says of each that fails what was wrong and how to repeat it."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys

from tests.simulation.plan import make_plan

HANG_S = 600.0
"""A seed that takes longer ends the process, and shows where it stands."""

SAY_EACH = 100
"""After so many seeds, a line says how it goes."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one, with its log")
    parser.add_argument(
        "--twice",
        type=int,
        nargs="?",
        default=0,
        const=10**9,
        metavar="N",
        help="run each, or N of them, twice and compare what happened",
    )
    parser.add_argument(
        "--shrink", action="store_true", help="look for the fewest faults with which a seed fails"
    )
    parser.add_argument("--plant", default="", help="plant this bug before")
    parser.add_argument("--find", nargs="*", help="look for these planted bugs, or all, in so many seeds")
    parser.add_argument("--tries", type=int, default=10**6, help="for each of them, run so many of the seeds")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of words would differ
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    from tests.simulation.planted import BUGS, planted
    from tests.simulation.run import run_plan
    from tests.simulation.shrink import shrunk

    if options.find is not None:
        seeds = range(options.first, options.first + options.seeds)
        return find(options.find or list(BUGS), seeds, options.tries)
    seeds = range(options.first, options.first + options.seeds)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    stride = max(1, len(seeds) // max(1, options.twice))  # from one that is run twice to the next
    failed, simulated_s, took_s = 0, 0.0, 0.0

    def said(count: int) -> str:
        figures = f"{failed} of {count} seeds failed; {simulated_s:.0f} s of services in {took_s:.0f} s"
        return f"{figures} of one core, {simulated_s / max(took_s, 1e-9):.0f} times as fast"

    with planted(options.plant):
        for count, seed in enumerate(seeds):
            if count and not count % SAY_EACH:
                print(f"before seed {seed}: {said(count)}", flush=True)
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            plan = make_plan(seed)
            outcome = run_plan(plan, keep_log=options.seed is not None)
            twice = options.twice and not count % stride
            if twice and (again := run_plan(plan)).digest != outcome.digest:
                outcome.problems.append(f"it does not repeat itself: {outcome.digest} and {again.digest}")
            faulthandler.cancel_dump_traceback_later()
            simulated_s, took_s = simulated_s + outcome.simulated_s, took_s + outcome.took_s
            for line in outcome.lines or ():
                print(line)
            if not outcome.problems:
                continue
            failed += 1
            plant = f" --plant {options.plant}" if options.plant else ""
            print(f"seed {seed} fails: {outcome.problems[0]}")
            print(f"  {plan.table}, {plan.actors} actors of {plan.slots} slots, {plan.shards} shards")
            if options.shrink:
                plan = shrunk(plan)
            for fault in plan.faults:
                print(f"  {fault}")
            print(f"  repeat it: python -m tests.simulation --seed {seed}{plant}", flush=True)
    print(said(len(seeds)))
    return 1 if failed else 0


def find(bugs: list[str], seeds: range, tries: int) -> int:
    """Say for each planted bug in which seed it is found; how many are not. Likely seeds are run first."""
    from tests.simulation.planted import planted, seeds_for
    from tests.simulation.run import run_seed

    lost = 0
    for bug in bugs:
        run = seeds_for(bug, seeds)[:tries]
        with planted(bug):
            for count, seed in enumerate(run, 1):
                problems = run_seed(seed).problems
                if problems:
                    print(f"{bug}: seed {seed}, {count} run: {problems[0][:150]}", flush=True)
                    break
            else:
                lost += 1
                print(f"{bug}: NOT FOUND, {len(run)} run", flush=True)
    print(f"{len(bugs) - lost} of {len(bugs)} planted bugs are found")
    return lost


if __name__ == "__main__":
    sys.exit(main())
