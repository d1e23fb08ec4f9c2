"""Cutting blocks into stages, and what travels between them; no process but this one."""

import itertools

import pytest
import torch
from torch import nn

from lightning_mcore._mcore import engine
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.sequential import BoundaryShapes, SequentialChunk, cut_blocks
from lightning_mcore.stage import Stage


def linear(size):
    """A block of ``size`` parameters."""
    return nn.Linear(1, size, bias=False)


def largest(weights, ranges):
    return max(sum(weights[i] for i in indices) for indices in ranges)


class TestCut:
    @pytest.mark.parametrize(
        ("weights", "parts", "expected"),
        [
            ([1, 1, 1, 1], 2, [2, 2]),
            ([9, 1, 1, 1], 2, [1, 3]),
            ([1, 1, 1, 9], 2, [3, 1]),
            ([5, 5, 1, 1, 1, 1], 3, [1, 1, 4]),
            ([1, 2, 3], 3, [1, 1, 1]),
            ([4], 1, [1]),
        ],
    )
    def test_is_balanced(self, weights, parts, expected):
        ranges = cut_blocks([linear(w) for w in weights], parts)
        assert [len(r) for r in ranges] == expected
        assert list(itertools.chain(*ranges)) == list(range(len(weights)))

    def test_no_cut_has_a_smaller_largest_stage(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            weights = torch.randint(1, 9, (7,), generator=generator).tolist()
            ranges = cut_blocks([linear(w) for w in weights], 3)
            every = (
                [range(a), range(a, b), range(b, 7)] for a in range(1, 6) for b in range(a + 1, 7)
            )
            assert largest(weights, ranges) == min(largest(weights, r) for r in every)

    def test_blocks_without_parameters_count_too(self):
        assert [len(r) for r in cut_blocks([nn.ReLU() for _ in range(4)], 2)] == [2, 2]

    def test_too_few_blocks_are_refused(self):
        with pytest.raises(ConfigurationError, match=r"2 blocks.*`pp` x `vpp` = 3.*fewer stages"):
            cut_blocks([linear(1), linear(1)], 3)

    def test_a_parameter_of_two_stages_is_refused(self):
        first, last = linear(3), linear(3)
        last.weight = first.weight
        blocks = [first, linear(3), linear(3), last]
        with pytest.raises(ConfigurationError, match=r"`weight` of block 3.*stages 0 and 1.*untie"):
            cut_blocks(blocks, 2)
        assert len(cut_blocks(blocks, 1)) == 1


BLOCKS = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2), nn.Linear(2, 3), nn.Linear(3, 1)]
RANGES = [range(0, 2), range(2, 4), range(4, 5)]


class TestBoundaryShapes:
    def test_are_those_behind_each_stage_but_the_last(self):
        shapes = BoundaryShapes(BLOCKS, RANGES)
        assert shapes.after_stages(torch.zeros(5, 4)) == [(5, 6), (5, 3)]
        assert shapes.after_stages(torch.zeros(2, 7, 4)) == [(2, 7, 6), (2, 7, 3)]

    def test_are_found_without_running_the_blocks_themselves(self):
        class Counting(nn.Module):
            devices: list = []  # noqa: RUF012

            def forward(self, x):
                self.devices.append(x.device.type)
                return x

        shapes = BoundaryShapes([Counting(), linear(1)], [range(1), range(1, 2)])
        shapes.after_stages(torch.zeros(2, 1))
        shapes.after_stages(torch.ones(2, 1))
        assert Counting.devices == ["meta"]  # once for each shape

    def test_a_block_of_several_outputs_is_refused(self):
        class Pair(nn.Module):
            def forward(self, x):
                return x, x

        shapes = BoundaryShapes([Pair(), linear(1)], [range(1), range(1, 2)])
        with pytest.raises(ConfigurationError, match=r"Block 0 \(Pair\) returns tuple.*factory"):
            shapes.after_stages(torch.zeros(1, 1))

    def test_a_block_that_looks_at_values_is_refused(self):
        class Branching(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

        shapes = BoundaryShapes([Branching(), linear(1)], [range(1), range(1, 2)])
        with pytest.raises(ConfigurationError, match=r"block 0 \(Branching\).*\(1, 1\).*factory"):
            shapes.after_stages(torch.zeros(1, 1))


def chunks(count=3):
    ranges = {1: [range(5)], 3: RANGES}[count]
    shapes = BoundaryShapes(BLOCKS, ranges) if count > 1 else None
    config = engine.native_config(count, {"pipeline_dtype": torch.float32})
    return [
        SequentialChunk(BLOCKS, ranges[i], Stage(i, count, None), config, engine.MODEL_TYPE, shapes)
        for i in range(count)
    ]


class TestChunk:
    def test_stages_together_are_the_whole(self):
        x = torch.randn(5, 4)
        stages, sent = chunks(), None
        for stage in stages:
            stage.set_input_tensor([sent])
            sent = stage(x)
        torch.testing.assert_close(sent, nn.Sequential(*BLOCKS)(x))

    def test_what_travels_has_one_flat_shape(self):
        x = torch.randn(5, 4)
        first, second, _ = chunks()
        length, samples = first.activation_shape((x,), {})
        assert (length, samples) == (5 * 6, 1)
        out = first(x)
        assert out.shape == (length, samples, 1)
        second.set_input_tensor([out])
        padded = second(x)
        assert padded.shape == out.shape
        assert not padded[5 * 3 :].any()

    def test_gradients_reach_the_input_through_the_padding(self):
        x = torch.randn(5, 4)
        first, second, last = chunks()
        received = first(x).detach().requires_grad_()
        second.set_input_tensor([received])
        last.set_input_tensor([second(x)])
        last(x).sum().backward()
        assert received.grad.abs().sum() > 0

    def test_what_is_sent_has_storage_of_its_own(self):
        """The engine frees it, and the backward pass still needs the block's output."""
        first = chunks()[0]
        kept = []
        first.blocks["1"].register_forward_hook(lambda m, i, out: kept.append(out))
        sent = first(torch.randn(5, 4))
        assert sent.untyped_storage().data_ptr() != kept[0].untyped_storage().data_ptr()

    def test_parameters_are_named_by_their_place_in_the_whole(self):
        names = [name for chunk in chunks() for name, _ in chunk.named_parameters()]
        assert names == [f"blocks.{i}.{p}" for i in (0, 2, 3, 4) for p in ("weight", "bias")]

    def test_one_stage_is_the_plain_model(self):
        x = torch.randn(2, 4)
        (chunk,) = chunks(1)
        assert chunk.pre_process
        assert chunk.post_process
        torch.testing.assert_close(chunk(x), nn.Sequential(*BLOCKS)(x))

    def test_it_takes_one_tensor(self):
        first = chunks()[0]
        with pytest.raises(ConfigurationError, match=r"exactly one tensor.*2 positional"):
            first(torch.zeros(1, 4), torch.zeros(1, 4))
        with pytest.raises(ConfigurationError, match=r"0 positional and 1 keyword"):
            first(x=torch.zeros(1, 4))
