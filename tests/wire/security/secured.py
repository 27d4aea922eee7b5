"""Sockets with keys."""

import pytest

from troupe.common.wire.security.keys import load_keys, make_keys
from troupe.common.wire.sockets import Security


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys")
    make_keys(path)
    return path


def secured(folder, role):
    return Security(keys=load_keys(folder, role))
