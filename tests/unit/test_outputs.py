"""What a step returned for its microbatches is put back together as one output."""

from collections import namedtuple

import pytest
import torch

from lightning_mcore.outputs import merge_outputs
from lightning_mcore.schedule import MicrobatchOutput

Pair = namedtuple("Pair", ["x", "y"])


def merged(*values, samples=None):
    sizes = samples or [1] * len(values)
    return merge_outputs([MicrobatchOutput(v, s) for v, s in zip(values, sizes, strict=True)])


def test_nothing_gives_nothing():
    assert merge_outputs([]) is None
    assert merged(None, None) is None


def test_a_single_output_is_itself():
    value = object()
    assert merged(value) is value


def test_tensors_are_joined_along_samples_in_order():
    parts = torch.arange(10).reshape(5, 2).split(2)
    assert torch.equal(merged(*parts, samples=[2, 2, 1]), torch.arange(10).reshape(5, 2))


def test_scalars_are_weighted_with_their_samples():
    value = merged(torch.tensor(1.0), torch.tensor(4.0), samples=[2, 1])
    assert value == 2.0
    assert value.dtype == torch.float32
    assert value.dim() == 0


def test_a_bf16_scalar_keeps_its_dtype():
    assert (
        merged(torch.tensor(1.0).bfloat16(), torch.tensor(3.0).bfloat16()).dtype == torch.bfloat16
    )


def test_containers_are_joined_entry_by_entry():
    first = {"loss": torch.tensor(1.0), "in": (torch.zeros(2), [torch.zeros(2, 1)])}
    second = {"loss": torch.tensor(3.0), "in": (torch.ones(1), [torch.ones(1, 1)])}
    value = merged(first, second, samples=[2, 1])
    assert float(value["loss"]) == pytest.approx(5 / 3)
    assert value["in"][0].tolist() == [0.0, 0.0, 1.0]
    assert value["in"][1][0].shape == (3, 1)


def test_named_tuples_keep_their_type():
    value = merged(Pair(torch.zeros(1), torch.tensor(0.0)), Pair(torch.ones(1), torch.tensor(1.0)))
    assert isinstance(value, Pair)
    assert value.x.tolist() == [0.0, 1.0]


def test_lists_of_values_per_sample_are_chained():
    assert merged(["a", "b"], ["c"]) == ["a", "b", "c"]


def test_anything_else_becomes_a_list():
    assert merged("a", "b") == ["a", "b"]
    assert merged(1.5, 2.5) == [1.5, 2.5]
