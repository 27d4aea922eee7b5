"""Whatever an environment draws becomes a picture, or a cause in one line; never an end of the evaluation."""

import numpy as np
import pytest

from troupe.common.envs.spectator import NoPictureError, spectator_view

PICTURE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
FLOAT = PICTURE / 255


@pytest.mark.parametrize(
    "drawn",
    [
        PICTURE,
        np.moveaxis(PICTURE, -1, 0),
        FLOAT,
        np.moveaxis(FLOAT.astype(np.float32), -1, 0),
        PICTURE.astype(np.float64),
        PICTURE.astype(np.int64),
        np.concatenate([PICTURE, np.full((40, 60, 1), 255, np.uint8)], axis=-1),
        [PICTURE[::-1], PICTURE],
    ],
)
def test_colours(drawn):
    view = spectator_view("gym:X", drawn)
    assert (view.dtype, view.shape) == (np.uint8, (40, 60, 3))
    np.testing.assert_array_equal(view, PICTURE)


@pytest.mark.parametrize("drawn", [PICTURE[..., 0], PICTURE[..., :1], PICTURE[None, ..., 0], FLOAT[..., 0]])
def test_grey(drawn):
    np.testing.assert_array_equal(spectator_view("gym:X", drawn), PICTURE[..., :1].repeat(3, axis=-1))


def test_masks_and_numbers_out_of_range():
    assert spectator_view("gym:X", np.eye(4, dtype=bool))[..., 0].tolist() == (255 * np.eye(4)).tolist()
    wild = np.array([[np.nan, np.inf, -5.0, 300.0]])
    assert spectator_view("gym:X", wild)[0, :, 0].tolist() == [0, 255, 0, 255]


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        (None, "NoneType"),
        ("+--+", "str"),
        (np.zeros(4), r"float64 \[4\]"),
        (np.zeros((5, 6, 7)), r"float64 \[5, 6, 7\]"),
        (np.zeros((0, 4, 3), np.uint8), r"uint8 \[0, 4, 3\]"),
        ([], "list"),
    ],
)
def test_what_is_no_picture(drawn, said):
    with pytest.raises(NoPictureError, match="gym:X returns " + said):
        spectator_view("gym:X", drawn)
