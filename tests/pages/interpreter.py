"""A Python that is told one block after the other, as a notebook is: lines of JSON on standard input."""

import json
import sys
import traceback

if __name__ == "__main__":
    space = {"__name__": "blocks"}
    for line in sys.stdin:
        try:
            exec(compile(json.loads(line), "block", "exec"), space)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            print("\x01failed", flush=True)
        else:
            print("\x01done", flush=True)
