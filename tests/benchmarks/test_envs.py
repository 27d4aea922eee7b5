"""What an environment is measured beside."""

import pytest

from benchmarks.envs import bare_atari
from troupe.common.config.env_section import EnvConfig

pytest.importorskip("ale_py")


@pytest.mark.parametrize(("every", "count"), [(True, 18), (False, 6)])
def test_the_library_alone_has_the_actions_that_it_is_given(every, count):
    """One that it does not have hangs it."""
    step = bare_atari(EnvConfig(id="atari:pong", full_action_space=every), 1)
    assert step.__self__.single_action_space.n == count
