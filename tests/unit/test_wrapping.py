"""What parameters are called in messages."""

from __future__ import annotations

from torch import nn

from lightning_mcore.wrapping import trainable_names


def test_parameters_have_the_names_that_their_author_knows():
    plain, frozen = nn.Module(), nn.Linear(2, 2).requires_grad_(False)
    plain.inner = nn.ModuleDict({"inner": nn.Linear(2, 2), "frozen": frozen})
    assert list(trainable_names([plain]).values()) == ["inner.weight", "inner.bias"]
    two = [nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)]
    assert list(trainable_names(two).values()) == ["chunk 0: weight", "chunk 1: weight"]
