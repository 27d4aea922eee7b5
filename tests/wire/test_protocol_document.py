"""docs/protocol.md is complete, its examples decode, and its clients work."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest

from common.data.replay import Replay
from common.data.table import TableConfig
from common.runtime.lifecycle import StopSignal
from common.wire import messages, sockets
from common.wire.codec import PROTOCOL_VERSION, decode, encode
from services.replay.service import ReplayService
from tests.wire.conftest import LOOPBACK

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
KINDS = sorted(messages.MESSAGES)


def section(kind: str) -> str:
    match = re.search(rf"^### {kind}\n(.*?)(?=^#|\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert match, f"no section about {kind}"
    return match[1]


def example(kind: str) -> list[bytes]:
    """The frames of a section's example."""
    block = re.search(r"```text\n(.*?)```", section(kind), re.DOTALL)[1]
    parts = re.split(r"^frame \d+ \((\d+) bytes\).*\n", block, flags=re.MULTILINE)[1:]
    frames = []
    for size, text in zip(parts[::2], parts[1::2], strict=True):
        dump = text.split("in hexadecimal\n")[-1]
        frame = bytes.fromhex("".join(dump.split()))
        assert len(frame) == int(size)
        frames.append(frame)
    return frames


def test_the_document_is_about_this_version():
    assert f"# The wire protocol, version {PROTOCOL_VERSION}" in DOCUMENT


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_described_as_in_the_code(kind):
    text = section(kind)
    spec = messages.MESSAGES[kind]
    for name, meaning in {**spec.fields, **spec.arrays}.items():
        assert f"| `{name}` | {meaning} |" in text


@pytest.mark.parametrize("kind", KINDS)
def test_the_examples_are_what_would_be_sent(kind):
    frames = example(kind)
    message = decode(frames)
    assert message.type == kind
    assert [bytes(frame) for frame in encode(message)] == frames
    spec = messages.MESSAGES[kind]
    if "*" not in spec.fields:
        assert set(message.fields) <= set(spec.fields)
    patterns = {re.sub("FIELD$", "", name) for name in spec.arrays}
    if "*" not in patterns:
        assert all(any(name.startswith(pattern) for pattern in patterns) for name in message.arrays)


def test_every_kind_of_error_is_explained():
    for kind in [messages.NO_SLOTS, messages.UNKNOWN_PEER, messages.REFUSED_HASH, messages.REFUSED_VERSION]:
        assert f"`{kind}`" in DOCUMENT
    sources = Path(__file__).parents[2].glob("common/wire/*.py")
    kinds = set(re.findall(r'WireError\(\s*"(\w+)"', "".join(path.read_text() for path in sources)))
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
    table = TableConfig(capacity=100)
    replay = Replay(tmp_path, [table], budget_bytes=1 << 26, seed=1)
    router = sockets.make_router(ctx, LOOPBACK)
    stop = StopSignal()
    service = ReplayService(replay, router, stop)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        status = clients["replay_client"](sockets.bound_endpoint(router))
    finally:
        stop.set()
        thread.join(10)
        router.close(linger=0)
        replay.close()
    assert status["tables"]["default"]["items"] == 3
    assert status["updated_priorities"] == 8
    assert status["rejected"] == {}


def test_the_control_client_of_the_document_works(serve, clients):
    server = serve()
    weights = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(7, np.int64)}
    server.publish(5, weights)
    version, tensors = clients["control_client"](server.control_endpoint)
    assert version == 5
    for name, array in weights.items():
        np.testing.assert_array_equal(tensors[name], array)
    assert server.telemetry.get(timeout=5).metrics == {"stranger/tensors": 2.0}
    assert server.wait_until_empty(5) == []
    assert server.rejected() == {}
