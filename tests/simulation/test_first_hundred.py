"""Seeds 1 to 100: a file of their own, for tests of two files run side by side."""

import pytest

from tests.simulation.seeds import simulate


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("first", [1, 51])
def test_no_seed_finds_anything_wrong_and_some_repeat_themselves(first):
    code, said = simulate("--first", first, "--seeds", 50, "--twice", 5)
    assert code == 0, said
