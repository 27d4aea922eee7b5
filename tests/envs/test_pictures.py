"""Pictures of every layout become what a convolution gets, or are refused; none is a vector unasked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_spec, make_vector
from troupe.common.errors import ConfigError
from troupe.common.nets.parts import PartInputs, image_shape
from troupe.common.nets.pixels import NormalizedPixels

PICTURE = "tests.envs.counting:Picture-v0"


def config(*, flatten: bool = False, grayscale: bool = True, **kwargs: object) -> EnvConfig:
    return EnvConfig(id=PICTURE, frame_size=40, flatten=flatten, grayscale=grayscale, kwargs=kwargs)


@pytest.mark.parametrize("grayscale", [True, False])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"shape": (40, 48, 3)},
        {"shape": (40, 48)},
        {"shape": (40, 48, 1)},
        {"shape": (3, 40, 48)},
        {"shape": (1, 40, 48)},
        {"shape": (3, 40, 48), "dtype": "float32", "high": 1.0},
        {"shape": (40, 48, 3), "dtype": "float64", "high": 1.0},
        {"shape": (40, 48, 3), "dtype": "float32", "high": 255.0},
        {"shape": (40, 48), "dtype": "int64", "high": 255},
    ],
    ids=str,
)
def test_every_layout_of_a_picture_becomes_the_same_frame(kwargs: dict[str, object], grayscale: bool) -> None:
    cfg = config(grayscale=grayscale, **kwargs)
    spec = make_spec(cfg)
    assert spec.obs_shape == ((4, 40, 40) if grayscale else (4, 3, 40, 40))
    assert (spec.obs_dtype, spec.pixels, spec.stack) == ("uint8", True, 4)
    env = make_vector(cfg, 1, 1)
    env.reset()
    frame = env.step(np.zeros(1, np.int64)).obs[0, -1]
    assert not env.failures
    assert (frame[..., :8, :] == 255).all()
    assert (frame[..., 8:, :19] == 204).all()
    assert (frame[..., 8:, 21:] == 0).all()


@pytest.mark.parametrize(
    ("kwargs", "words", "numbers"),
    [
        ({"shape": (7, 7, 3)}, "has pictures of 7 x 7, under 32 x 32 pixels", "147"),
        ({"shape": (10, 10, 4), "dtype": "bool", "high": 1}, "neither 1 nor 3 colours", "400"),
        ({"shape": (4, 84, 84)}, "neither 1 nor 3 colours", "28,224"),
        ({"shape": (40, 48, 3), "dtype": "float32", "high": 1000}, "go from 0 to 1000", "5,760"),
        (
            {"nested": "dict", "dtype": "float32", "high": 1000.0},
            r"observation\['camera'\] whose float32 values go from 0 to 1000",
            "5,763",
        ),
        ({"nested": "tuple", "shape": (9, 9, 3)}, r"observation\[1\] of 9 x 9, under 32", "246"),
    ],
    ids=str,
)
def test_other_pictures_are_vectors_only_where_that_is_wanted(
    kwargs: dict[str, object], words: str, numbers: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        make_spec(config(**kwargs))
    assert f"set env.flatten to true to have all that it returns as one vector of {numbers} numbers" in str(
        error.value
    )
    spec = make_spec(config(flatten=True, **kwargs))
    assert (spec.obs_shape, spec.pixels) == ((int(numbers.replace(",", "")),), False)
    whole = "nested" not in kwargs and "float" not in str(kwargs.get("dtype"))
    assert spec.obs_dtype == ("uint8" if whole else "float32")
    env = make_vector(config(flatten=True, **kwargs), 2, 1)
    assert env.reset().shape == (2, *spec.obs_shape)


@pytest.mark.parametrize("nested", ["dict", "tuple"])
@pytest.mark.parametrize(
    ("shape", "dtype", "high"),
    [
        ((40, 48, 3), "uint8", 255),
        ((3, 40, 48), "uint8", 255),
        ((40, 48, 3), "float32", 1.0),
        ((3, 40, 48), "float64", 1.0),
        ((1, 40, 48), "float32", 255.0),
        ((40, 48), "float32", 1.0),
    ],
    ids=str,
)
def test_a_picture_beside_other_things_reaches_the_convolution_as_pixels(
    nested: str, shape: tuple[int, ...], dtype: str, high: float
) -> None:
    cfg = config(nested=nested, shape=shape, dtype=dtype, high=high)
    env = make_vector(cfg, 1, 1)
    (leaf,) = [leaf for leaf in env.spec.obs_leaves if leaf.picture]
    assert (leaf.dtype, leaf.shape) == ("uint8", shape)
    env.reset()
    obs = env.step(np.zeros(1, np.int64)).obs
    scale = NormalizedPixels(image_shape(leaf), 0)
    seen: list[torch.Tensor] = []
    scale.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    inputs = PartInputs(env.spec.obs_leaves, pixels=True)
    inputs.scales[env.spec.obs_leaves.index(leaf)] = scale
    inputs(torch.from_numpy(obs))
    (image,) = seen[0]
    assert (image[:, :8] == 255).all()
    assert (image[:, 8:, :19] == 204).all()
    assert (image[:, 8:, 25:] == 0).all()


def test_a_nan_in_a_float_picture_beside_other_things_is_seen_as_well() -> None:
    env = make_vector(config(nested="dict", shape=(40, 48), dtype="float32", high=1.0), 1, 1)
    env.reset()
    inner = env._slots[0].env.unwrapped  # type: ignore[attr-defined]
    inner._obs = lambda: {"camera": np.full((40, 48), np.nan, np.float32), "speed": 1}
    assert env.step(np.zeros(1, np.int64)).discarded == [0]
    assert "returned an observation with nan" in str(env.failures[0])


def test_a_nan_in_a_float_picture_is_seen_before_it_is_a_pixel() -> None:
    env = make_vector(config(shape=(40, 48), dtype="float32", high=1.0), 1, 1)
    env.reset()
    inner = env._slots[0].env.unwrapped  # type: ignore[attr-defined]
    inner._obs = lambda: np.full((40, 48), np.nan, np.float32)
    assert env.step(np.zeros(1, np.int64)).discarded == [0]
    assert "returned an observation with nan" in str(env.failures[0])


def test_small_tables_of_numbers_are_vectors() -> None:
    assert make_spec(config(shape=(5, 5), dtype="float32", high=np.inf)).obs_shape == (25,)
