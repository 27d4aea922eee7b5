"""What an agent's row is to an environment, for every kind of action space."""

import dataclasses
import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from troupe.common.envs.gymnasium_spaces import action_spec, observation_leaves
from troupe.common.errors import ConfigError
from troupe.common.spaces import MAX_NUMBERS, ActionSpec, Leaf, runs

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([4.0, 10.0], np.float32))
NEST = spaces.Dict(
    {
        "turn": spaces.Discrete(3, start=-1),
        "arm": spaces.Tuple([BOX, spaces.MultiBinary(2)]),
        "speed": spaces.Box(-np.inf, np.inf, (1,), np.float64),
    }
)


def spec_of(space, bins=0, ratio=0.0):
    return action_spec("test:env", space, bins, ratio)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Dict({"a": spaces.Discrete(3), "b": BOX}), "a choice of 3 and 2 real numbers"),
        (spaces.MultiDiscrete([2, 5]), "2 choices of 2 to 5"),
        (spaces.MultiBinary(4), "4 choices of 2"),
        (spaces.Box(-1, 1, (1,)), "a real number"),
    ],
)
def test_an_action_is_told_in_words(space, words):
    assert str(spec_of(space)) == words


def test_one_of_several_spaces_is_no_tuple_of_them():
    one = spaces.OneOf([spaces.Discrete(3), BOX])
    with pytest.raises(ConfigError, match="OneOf is none of"):
        spec_of(one)
    with pytest.raises(ValueError, match="OneOf is none of"):
        observation_leaves(spaces.Dict({"either": one}))


def test_a_row_has_the_choices_first_and_then_the_reals():
    spec = spec_of(NEST)
    assert (spec.choices, spec.bounded) == ((2, 2, 3), (True, True, False))
    assert (spec.shape, spec.dtype, spec.stored_dtype) == ((6,), np.float32, "float32")
    action = spec.native([0, 1, 2, -1.0, 0.5, 7.25])
    assert NEST.contains(action)
    assert action["turn"] == 1
    assert action["arm"][0].tolist() == [-2.0, 7.5]
    assert action["arm"][1].tolist() == [0, 1]
    assert action["speed"].tolist() == [7.25]


def test_one_choice_is_an_int_and_costs_nothing():
    spec = spec_of(spaces.Discrete(4, start=2))
    assert (spec.count, spec.shape, spec.dtype, spec.limits) == (4, (), np.int64, (0, 3))
    assert spec.native(1) == 3
    assert type(spec.native(1)) is int
    assert spec.natives(np.array([0, 3])).tolist() == [2, 5]
    assert spec_of(spaces.MultiDiscrete([5])).native(3).tolist() == [3]
    assert spec_of(spaces.Dict({"a": spaces.Discrete(3)})).native(2) == {"a": 2}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_rows_are_actions_of_any_space(data):
    leaf = st.one_of(
        st.builds(spaces.Discrete, st.integers(1, 5), start=st.integers(-3, 3)),
        st.lists(st.integers(1, 4), min_size=1, max_size=3).map(spaces.MultiDiscrete),
        st.integers(1, 4).map(spaces.MultiBinary),
        st.sampled_from([(-1, 1), (0, np.inf), (-np.inf, np.inf), (-3, 8)]).flatmap(
            lambda ends: st.sampled_from([np.float32, np.float64]).map(
                lambda dtype: spaces.Box(ends[0], ends[1], (2, 2), dtype)
            )
        ),
        st.just(spaces.Box(-3, 200, (2,), np.int16)),
    )
    space = data.draw(
        st.recursive(
            leaf,
            lambda inner: st.one_of(
                st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
                st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict),
            ),
            max_leaves=5,
        )
    )
    spec = spec_of(space)
    rows = spec.random(np.random.default_rng(data.draw(st.integers(0, 99))), 4)
    assert spec.fault(rows, 4) == ""
    for row, native in zip(rows, spec.natives(rows), strict=True):
        assert space.contains(spec.native(row)), spec.native(row)
        assert space.contains(native), native
        np.testing.assert_equal(native, spec.native(row))
    assert space.contains(spec.native(spec.zeros(1)[0].tolist()))
    stored = json.loads(json.dumps(dataclasses.asdict(spec)))
    assert TypeAdapter(ActionSpec).validate_python(stored) == spec


def test_bins():
    spec = spec_of(BOX, 5)
    assert (spec.choices, spec.reals, spec.shape) == ((5, 5), 0, (2,))
    assert [spec.native([i, 4 - i])[0] for i in range(5)] == [-2.0, -0.5, 1.0, 2.5, 4.0]
    pendulum = spaces.Box(-2.0, 2.0, (1,))
    logarithmic = spec_of(pendulum, 7, 100.0)
    assert logarithmic.count == 7
    values = [logarithmic.native(i)[0] for i in range(7)]
    np.testing.assert_allclose(values, [-2.0, -0.2, -0.02, 0.0, 0.02, 0.2, 2.0], rtol=1e-5, atol=1e-12)
    for space, bins, ratio, match in (
        (pendulum, 6, 100.0, "odd number"),
        (pendulum, 1, 0.0, "at least 2"),
        (spaces.Discrete(3), 5, 0.0, "env.action_bins would have no effect"),
        (spaces.Box(-np.inf, 1, (1,)), 5, 0.0, "env.action_bins would have no effect"),
    ):
        with pytest.raises(ConfigError, match=match):
            spec_of(space, bins, ratio)


def test_what_no_agent_can_take_is_refused_in_a_line():
    for space in (
        spaces.Text(3),
        spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}),
        spaces.Dict({}),
        spaces.Box(-1, 1, (MAX_NUMBERS + 1,)),
        spaces.MultiDiscrete([40_000, 40_000]),
        spaces.Discrete(1 << 20),
    ):
        with pytest.raises(ConfigError, match="test:env has actions of") as refused:
            spec_of(space)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 300


def test_rows_that_are_no_actions_are_told():
    spec = spec_of(NEST)
    good = spec.zeros(2)
    assert spec.fault(good, 3) == "float32[2, 6] instead of float32[3, 6]"
    assert spec.fault(good.astype(np.int64), 2) == "int64[2, 6] instead of float32[2, 6]"
    for column, value, fault in ((0, 2, "choice"), (2, -1, "choice"), (5, np.nan, "finite"), (1, np.nan, "")):
        rows = good.copy()
        rows[1, column] = value
        assert fault in spec.fault(rows, 2)
        assert spec.fault(rows, 2)
    discrete = ActionSpec.discrete(3)
    assert discrete.fault(np.array([0, 2]), 2) == ""
    assert "choice" in discrete.fault(np.array([0, 3]), 2)


def test_a_stored_space_of_nonsense_is_refused():
    """Checkpoints say what an action is; none may ask for memory without bound."""
    adapter = TypeAdapter(ActionSpec)
    good = dataclasses.asdict(ActionSpec.discrete(3))
    leaf = good["leaves"][0]
    assert adapter.validate_python(good) == ActionSpec.discrete(3)
    for change in (
        {"choices": [2**40]}, {"choices": [0]}, {"shape": [2**31]}, {"shape": [-1]}, {"dtype": "object"},
        {"choices": [], "start": []}, {"start": []}, {"choices": [], "low": [None, 1], "high": [None]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="validation error"):
            adapter.validate_python({**good, "leaves": [{**leaf, **change}]})
    for leaves in ([], [leaf] * 300):
        with pytest.raises(ValueError, match="arrays in an action"):
            adapter.validate_python({**good, "leaves": leaves})


def test_runs():
    assert runs((2, 2, 3, 2)) == [(2, 2), (1, 3), (1, 2)]
    assert Leaf(shape=(2, 3), low=(0.0,) * 6, high=(1.0,) * 6).size == 6
    assert gymnasium.spaces.Box(-1, 1, (1,)).contains(spec_of(spaces.Box(-1, 1, (1,))).native([9.0]))
