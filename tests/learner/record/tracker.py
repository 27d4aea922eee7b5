"""A process like that of `trackers`, around a tracker that writes down what it is told.

    tracker.py FILE HOW

HOW is `well`, `refuses` (the run), `fails` and `interrupts` (every row), `hangs` (in the first row),
`lingers` (at the end) or `dies`.
"""

import json
import os
import sys
import time

from troupe.services.learner.record import trackers


class Notes:
    def __init__(self, path, how):
        self.path, self.how = path, how

    def note(self, *what):
        with open(self.path, "a") as file:
            file.write(json.dumps(what) + "\n")

    def begin(self, run):
        if self.how == "refuses":
            raise ConnectionError(f"no run for {os.environ['SOME_API_KEY']} at http://me:mine@host/")
        self.note("begin", run.id, run.config["a"])

    def add(self, steps, values):
        if self.how == "fails":
            raise ValueError("no rows\ntoday")
        if self.how == "interrupts":
            raise KeyboardInterrupt
        if self.how == "hangs":
            time.sleep(600)
        if self.how == "dies":
            os._exit(9)
        self.note("add", steps, values)

    def end(self, summary, complete):
        if self.how == "lingers":
            time.sleep(600)
        self.note("end", summary, complete)


if __name__ == "__main__":
    trackers.TRACKERS["notes"] = lambda: Notes(*sys.argv[2:])
    trackers.main()
