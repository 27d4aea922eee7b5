"""The control client of a learner that shares batches, without the learner; and what learners have alike."""

import hashlib

from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.services.learner.peers.state import packed


def joined(context, server, name="learner-1"):
    """A client that `server` has taken in as a learner."""
    endpoint = server.control_endpoint
    client = ControlClient(context, endpoint, role="learner", name=name, incarnation=new_incarnation())
    client.join(60)
    return client


def state_hash(agent, counters):
    """Of all that learners have alike."""
    return hashlib.sha256(packed(agent, counters).numpy().data).hexdigest()
