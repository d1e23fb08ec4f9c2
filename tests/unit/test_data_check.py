"""The checksum by which ranks notice that they draw different batches."""

import pytest
import torch

from lightning_mcore.data_check import fingerprint


def test_equal_batches_have_equal_fingerprints():
    def batch():
        return {"x": torch.arange(6).reshape(2, 3), "y": [torch.ones(2), "text"], "n": None}

    assert fingerprint(batch()) == fingerprint(batch())
    assert 0 <= fingerprint(batch()) < 2**32


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, 2.0, 4.0]),
        torch.tensor([2.0, 1.0, 3.0]),
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        torch.tensor([1.0, 2.0]),
    ],
)
def test_values_order_shape_and_dtype_count(other):
    assert fingerprint(torch.tensor([1.0, 2.0, 3.0])) != fingerprint(other)


def test_the_place_of_a_tensor_counts():
    a, b = torch.tensor([1]), torch.tensor([2])
    assert fingerprint((a, b)) != fingerprint((b, a))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.complex64]
)
def test_any_dtype_has_one(dtype):
    ones, zeros = torch.ones(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    assert fingerprint(ones) != fingerprint(zeros)


def test_layout_in_memory_does_not_count():
    x = torch.arange(6).reshape(2, 3)
    assert fingerprint(x.t().contiguous()) == fingerprint(x.t())


def test_scalars_empty_tensors_and_no_tensors():
    assert fingerprint(torch.tensor(1)) != fingerprint(torch.tensor(2))
    assert fingerprint(torch.zeros(0, 2)) != fingerprint(torch.zeros(0, 3))
    assert fingerprint("text") == fingerprint(None) == 0


def test_gradients_and_inference_tensors_are_no_obstacle():
    x = torch.ones(2)
    with torch.inference_mode():
        inference = torch.ones(2)
    expected = fingerprint(x)
    assert fingerprint(torch.ones(2, requires_grad=True)) == expected
    assert fingerprint(inference) == expected
