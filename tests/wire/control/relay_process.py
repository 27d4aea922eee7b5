"""A process that fetches parameters with others of its host, and says what it gets. Run by test_relay."""

import sys
import time
from pathlib import Path

import zmq

from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation


def main() -> None:
    endpoint, name, directory, patience_s = sys.argv[1:]
    context = zmq.Context()
    client = ControlClient(
        context,
        endpoint,
        role="viewer",
        name=name,
        incarnation=new_incarnation(),
        relay_directory=Path(directory),
        relay_patience_s=float(patience_s),
    )
    client.join(60.0)
    version, deadline_s = -1, time.monotonic() + 300.0
    while not client.state.stopping and time.monotonic() < deadline_s:
        params = client.params_if_newer(version)
        if params is not None:
            version = params.version
            total = float(params.params["w"].sum())
            print("version", version, total, client.relayed, int(client.relays), flush=True)
        time.sleep(0.01)
    client.close()
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
