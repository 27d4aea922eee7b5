"""Seeds 1 to 60: a file of their own, for tests of two files run side by side."""

import pytest

from tests.simulation.seeds import simulate


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_seed_finds_anything_wrong_and_some_repeat_themselves():
    code, said = simulate("--first", 1, "--seeds", 60, "--twice", 6)
    assert code == 0, said
