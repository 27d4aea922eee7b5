import numpy as np
import pytest
import torch

from troupe.common.wire.codec import Message, WireError, decode, encode
from troupe.common.wire.control.params import decode_params, encode_params, from_bfloat16, to_bfloat16

PARAMS = {
    "torso.weight": np.random.default_rng(1).standard_normal((32, 4, 8, 8)).astype(np.float32),
    "torso.bias": np.arange(7, dtype=np.float32),
    "norm.count": np.array(5, np.int64),
    "mask": np.array([True, False, True]),
    "empty": np.zeros((0, 3), np.float16),
    "last": np.ones(5),
}


def test_every_tensor_comes_back_as_a_view():
    manifest, blob = encode_params(PARAMS)
    message = decode([bytes(f) for f in encode(Message("PARAMS", {"manifest": manifest}, {"blob": blob}))])
    received = message.arrays["blob"]
    params = decode_params(message.fields["manifest"], received)
    assert list(params) == list(PARAMS)
    for name, array in PARAMS.items():
        assert params[name].dtype == array.dtype
        assert params[name].shape == array.shape
        np.testing.assert_array_equal(params[name], array)
        assert array.size == 0 or np.shares_memory(params[name], received)


def test_the_blob_is_a_snapshot():
    weights = np.zeros(10, np.float32)
    manifest, blob = encode_params({"w": weights})
    weights += 1
    assert decode_params(manifest, blob)["w"].sum() == 0


def test_strided_tensors_are_packed():
    matrix = np.arange(12.0).reshape(3, 4)
    manifest, blob = encode_params({"t": matrix.T, "s": matrix[:, 1]})
    params = decode_params(manifest, blob)
    np.testing.assert_array_equal(params["t"], matrix.T)
    np.testing.assert_array_equal(params["s"], matrix[:, 1])


@pytest.mark.parametrize(
    "manifest",
    [
        [1],
        [["w", "float32", [1]]],
        [["w", "object", [1], 0]],
        [["w", ["float32"], [1], 0]],
        [[5, "float32", [1], 0]],
        [["w", "float32", [17], 0]],
        [["w", "float32", [1], 64]],
        [["w", "float32", [1], 2]],
        [["w", "float32", [-1], 0]],
        [["w", "float32", [1], -4]],
        [["w", "float32", 1, 0]],
        [["w", "float32", [2**40, 2**40], 0]],
        [["w", "float32", [1], 0], ["w", "float32", [1], 4]],
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(manifest):
    with pytest.raises(WireError, match="bad_params"):
        decode_params(manifest, np.zeros(64, np.uint8))
    with pytest.raises(WireError, match="bad_params"):
        decode_params([], np.zeros((8, 8), np.uint8))


def test_objects_are_no_parameters():
    with pytest.raises(WireError, match="bad_dtype"):
        encode_params({"w": np.array([object()])})


def test_bfloat16_rounds_as_torch_does():
    rng = np.random.default_rng(0)
    every = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)  # any bits: NaN, denormals, ...
    halves = (np.arange(2**16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)  # exactly between two
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -1e-45, 1.0], np.float32)
    with np.errstate(invalid="ignore"):
        values = np.concatenate([every, halves, edges])
        ours = from_bfloat16(to_bfloat16(values))
    theirs = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(ours, theirs)  # NaN counts as equal to NaN
    finite = np.isfinite(ours) & (np.abs(values) > 1e-37)
    assert (np.abs(ours[finite] / values[finite] - 1) <= 2.0**-8).all()


def test_only_matrices_travel_in_bfloat16_and_come_back_as_float32():
    manifest, blob = encode_params(PARAMS, bfloat16=True)
    assert {entry[0] for entry in manifest if entry[1] == "bfloat16"} == {"torso.weight"}
    assert blob.nbytes < 0.6 * encode_params(PARAMS)[1].nbytes
    params = decode_params(manifest, blob)
    assert list(params) == list(PARAMS)
    for name, array in PARAMS.items():
        assert params[name].dtype == array.dtype
        assert params[name].shape == array.shape
        if name != "torso.weight":
            np.testing.assert_array_equal(params[name], array)
    np.testing.assert_allclose(params["torso.weight"], PARAMS["torso.weight"], rtol=2.0**-8)
    again, same = encode_params(params, bfloat16=True)  # what is rounded already does not change any more
    assert again == manifest
    np.testing.assert_array_equal(same, blob)


def test_bfloat16_lies_inside_the_buffer():
    with pytest.raises(WireError, match="bad_params"):
        decode_params([["w", "bfloat16", [33], 0]], np.zeros(64, np.uint8))
