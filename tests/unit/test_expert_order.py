"""The hook behind a router, names of experts in a checkpoint, and whose parameters are whose."""

from __future__ import annotations

import types

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_mcore._mcore.expert_exchange import expert_parameters
from lightning_mcore._mcore.expert_order import ExpertOrder, canonical_tree, expert_orders

EXPERTS, TOKENS = 4, 5


class Router(nn.Module):
    """Returns what the engine's routers return: ``probs`` and ``routing_map``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 3))

    def forward(self, x):
        probs = (x @ self.weight.T).softmax(-1)
        chosen = probs.topk(2).indices
        routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter(1, chosen, True)
        return probs * routing_map, routing_map


class Layer(nn.Module):
    def __init__(self, names=("linear_fc1.weight{}", "linear_fc2.weight{}"), local=2) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(num_moe_experts=EXPERTS)
        self.router = Router()
        self.num_local_experts = local
        self.experts = nn.Module()
        for name in names:
            for index in range(local if "{}" in name else 1):
                owner = self.experts
                *path, leaf = name.format(index).split(".")
                for part in path:
                    if not hasattr(owner, part):
                        owner.add_module(part, nn.Module())
                    owner = getattr(owner, part)
                owner.register_parameter(leaf, nn.Parameter(torch.zeros(2, 3)))


def test_the_hook_sends_tokens_to_slots_and_counts_experts():
    layer = Layer()
    x = torch.randn(TOKENS, 3)
    probs, routing_map = layer.router(x)
    seen = []
    layer.router.register_forward_hook(lambda router, args, output: seen.append(output[0]))
    order = ExpertOrder("layer.1", layer)
    torch.testing.assert_close(layer.router(x)[0], probs, rtol=0, atol=0)
    order.set_slots((2, 0, 3, 1))
    moved_probs, moved_map = layer.router(x)
    for slot, expert in enumerate((2, 0, 3, 1)):
        assert torch.equal(moved_probs[:, slot], probs[:, expert])
        assert torch.equal(moved_map[:, slot], routing_map[:, expert])
    assert torch.equal(seen[-1], moved_probs), "other hooks see what the dispatcher gets"
    assert order.counts.tolist() == (2 * routing_map.sum(0)).tolist()
    moved_probs.square().sum().backward()
    moved, layer.router.weight.grad = layer.router.weight.grad, None
    order.set_slots(tuple(range(EXPERTS)))
    layer.router(x)[0].square().sum().backward()
    torch.testing.assert_close(moved, layer.router.weight.grad)


def test_tokens_count_once_in_training_only():
    layer = Layer()
    order = ExpertOrder("layer.1", layer)
    x = torch.randn(TOKENS, 3, requires_grad=True)
    with torch.no_grad():
        layer.router(x)
    layer.router.eval()
    layer.router(x)
    assert order.counts.sum() == 0
    layer.router.train()
    # The first pass of an engine's recomputation has no gradients, the second has.
    with torch.no_grad():
        layer.router(x)
    layer.router(x)[0].sum().backward()
    assert order.counts.sum() == 2 * TOKENS
    order.set_to_zero()
    checkpoint(lambda y: layer.router(y)[0], x, use_reentrant=True).sum().backward()
    assert order.counts.sum() == 2 * TOKENS


def test_a_layer_is_left_as_it_was():
    layer = Layer()
    order = ExpertOrder("layer.1", layer)
    order.set_slots((1, 0, 2, 3))
    with pytest.raises(AssertionError, match="still in order"):
        order.release()
    with pytest.raises(AssertionError, match="not a permutation"):
        order.set_slots((1, 1, 2, 3))
    order.set_slots((0, 1, 2, 3))
    order.release()
    assert not layer.router._forward_hooks
    assert expert_orders(layer) == {}


def test_shards_of_experts_are_named_by_expert():
    chunk = nn.ModuleDict({"mlp": Layer()})
    order = ExpertOrder("layer.1", chunk["mlp"])
    value = torch.zeros(2, 3)

    def tree():
        # Rank 1 of 2: slots 2 and 3, behind an axis of layers.
        found = {
            f"mlp.experts.linear_fc1.weight{i}": ShardedTensor.from_rank_offsets(
                "fc1", value, (0, 5, 7), (1, 2 + i, EXPERTS), prepend_axis_num=2
            )
            for i in range(2)
        }
        found["mlp.experts.linear_fc1._extra_state"] = ShardedObject(
            "extra", None, (7, EXPERTS), (5, 2), 0
        )
        found["mlp.router.weight"] = ShardedTensor.from_rank_offsets(
            "router", value, (0, 2, EXPERTS), prepend_axis_num=1
        )
        return found

    assert canonical_tree(chunk, tree()) == tree()
    order.set_slots((3, 1, 0, 2))
    named = canonical_tree(chunk, tree())
    assert named["mlp.experts.linear_fc1.weight0"].global_offset == (5, 0, 0, 0)
    assert named["mlp.experts.linear_fc1.weight1"].global_offset == (5, 2, 0, 0)
    assert named["mlp.experts.linear_fc1.weight0"].data is value
    assert named["mlp.experts.linear_fc1._extra_state"].global_offset == (5, 0)
    assert named["mlp.router.weight"].global_offset == (2, 0, 0)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ("local_experts.{}.linear_fc1.weight", "local_experts.{}.linear_fc2.weight"),
            {"linear_fc1.weight", "linear_fc2.weight"},
        ),
        (
            ("linear_fc1.weight{}", "linear_fc1.bias{}", "linear_fc2.weight{}"),
            {"linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight"},
        ),
    ],
    ids=["SequentialMLP", "TEGroupedMLP"],
)
def test_parameters_of_each_expert(names, expected):
    layer = Layer(names)
    found = expert_parameters(layer)
    assert [set(one) for one in found] == [expected] * 2
    own = {id(param) for param in layer.experts.parameters()}
    assert {id(param) for one in found for param in one.values()} == own
    by_name = dict(layer.experts.named_parameters())
    for index in range(2):
        assert found[index]["linear_fc1.weight"] is by_name[names[0].format(index)]


@pytest.mark.parametrize(
    "names",
    [("weight1", "weight2"), ("linear_fc1.weight", "linear_fc2.weight")],
    ids=["GroupedMLP", "single grouped weight"],
)
def test_parameters_that_experts_share(names):
    assert expert_parameters(Layer(names)) is None
