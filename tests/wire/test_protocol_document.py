"""docs/protocol.md is complete, its examples decode, and its clients work."""

import json
import re
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from docs import protocol as document
from tests.harness import LOOPBACK, Shard, until
from troupe.common.wire import messages, sockets
from troupe.common.wire.body import layout_of
from troupe.common.wire.codec import PROTOCOL_VERSION, decode, encode
from troupe.common.wire.security.claims import CLAIMS
from troupe.common.wire.security.keys import load_keys, make_keys

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = (DOCS / "protocol.md").read_text()
EXAMPLES = json.loads((DOCS / "protocol-examples.json").read_text())
KINDS = sorted({body.TYPE for body in messages.BODIES})


def test_the_document_is_about_this_version():
    assert f"# The wire protocol, version {PROTOCOL_VERSION}" in DOCUMENT


@pytest.mark.parametrize("page", list(document.pages()), ids=lambda path: path.name)
def test_the_tables_are_those_of_the_structs(page):
    text = page.read_text()
    assert document.renewed(text) == text, "make docs"
    assert "<!-- who may send what: made" in text


def test_the_page_of_security_shows_every_claim():
    page = (DOCS / "security.md").read_text()
    text = page.partition("<!-- who may claim what: made")[2].partition("<!-- end")[0]
    rows = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| `")]
    assert rows == [[f"| `{name}`", ", ".join(claim.roles)] for name, claim in CLAIMS.items()]


@pytest.mark.parametrize("body", messages.BODIES, ids=lambda body: body.__name__)
def test_every_message_has_a_section_and_every_field_a_meaning(body):
    section = re.search(rf"^### {body.TYPE}\n(.*?)(?=^#|\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)[1]
    assert document.described(body) in section
    layout = layout_of(body)
    attributes = {*layout.fields.values(), *(each for each, _ in (layout.arrays | layout.groups).values())}
    assert attributes <= set(document.meanings(body))


def test_every_request_says_who_may_send_it():
    answers = ("WELCOME", "HEARTBEAT_OK", "PARAMS", "ANNOUNCE", "ACTIONS", "INSERTED", "BATCH", "WAIT")
    assert set(messages.MAY_SEND) == set(KINDS) - {*answers, "STATUS_OK", "SNAPSHOT_OK", "ERROR"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_examples_are_what_would_be_sent(kind):
    frames = [bytes.fromhex(frame) for frame in EXAMPLES[kind]["frames"]]
    message = decode(frames)
    assert message.type == kind
    assert [bytes(frame) for frame in encode(message)] == frames
    assert msgpack.unpackb(frames[0]) == EXAMPLES[kind]["header"]
    body = next(each for each in reversed(messages.BODIES) if kind == each.TYPE)  # the CREDIT that answers
    again = decode(encode(body.of(message).message(message.request_id)))
    assert again.fields.items() >= message.fields.items()
    assert again.arrays.keys() == message.arrays.keys()


def test_every_kind_of_error_is_explained():
    constants = {value for name, value in vars(messages).items() if name.isupper() and isinstance(value, str)}
    kinds = {value for value in constants if value.islower()}
    root = Path(__file__).parents[2]
    for folder in ("common/wire", "common/data", "services/replay", "services/learner"):
        for path in (root / folder).glob("*.py"):
            kinds |= set(re.findall(r'(?:Wire|Refused)Error\(\s*"(\w+)"', path.read_text()))
    # What only ever happens on the side of the reader, before or after the wire.
    for kind in kinds - {"unencodable", "bad_params", "bad_batch"}:
        assert f"`{kind}`" in DOCUMENT, kind


@pytest.fixture
def clients() -> dict:
    """What the Python of the document defines."""
    space: dict = {"__name__": "document"}
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(blocks) == 3
    exec("\n".join(blocks), space)
    return space


def test_the_replay_client_of_the_document_works(ctx, clients, tmp_path):
    shard = Shard(ctx, tmp_path, LOOPBACK, capacity=100)
    try:
        status = clients["replay_client"](shard.endpoint)
    finally:
        shard.end()
    assert status["tables"]["default"]["items"] == 3
    assert status["updated_priorities"] == 8
    assert status["rejected"] == {}


def test_the_lines_about_keys_work(ctx, tmp_path):
    make_keys(tmp_path)
    router = sockets.make_router(ctx, LOOPBACK, sockets.Security(keys=load_keys(tmp_path, "replay")))
    space = {}
    exec(re.search(r"```py\n(.*?)```", DOCUMENT, re.DOTALL)[1], space)
    dealer = ctx.socket(zmq.DEALER)
    space["use_keys"](dealer, tmp_path / "replay.public", tmp_path / "actor.secret")
    dealer.connect(sockets.bound_endpoint(router))
    dealer.send(b"hello")
    assert router.poll(10_000)
    assert sockets.peer_key(sockets.receive_frames(router)[0]).role == "actor"


def test_the_control_client_of_the_document_works(serve, clients):
    server = serve()
    weights = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(7, np.int64)}
    server.publish(5, weights)
    version, tensors = clients["control_client"](server.control_endpoint)
    assert version == 5
    for name, array in weights.items():
        np.testing.assert_array_equal(tensors[name], array)
    until(lambda: not server.peers())
    assert server.rejected() == {}
