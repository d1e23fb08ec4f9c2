"""Which engine optimizer stands for which torch optimizer."""

import pytest
import torch

from lightning_mcore.optimizer import optimizer_kind


def make(cls, *groups, **options):
    settings = groups or ({},)
    params = [{"params": [torch.nn.Parameter(torch.zeros(1))], **group} for group in settings]
    return cls(params, **{"lr": 0.1, **options})


class MyAdamW(torch.optim.AdamW):
    """May compute anything."""


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (make(torch.optim.AdamW), "adamw"),
        (make(torch.optim.AdamW, weight_decay=0.0), "adamw"),
        (make(torch.optim.Adam), "adam"),
        (make(torch.optim.Adam, weight_decay=0.1), "adam_l2"),
        (make(torch.optim.Adam, {"weight_decay": 0.0}, {"weight_decay": 0.1}), "adam_l2"),
        (make(torch.optim.SGD), "sgd"),
        (make(torch.optim.SGD, momentum=0.9, nesterov=True), "sgd"),
        (make(torch.optim.RMSprop), "other"),
        (make(torch.optim.Adagrad), "other"),
        (make(torch.optim.RAdam), "other"),
        (make(MyAdamW), "other"),
        (make(torch.optim.AdamW, amsgrad=True), "other"),
        (make(torch.optim.AdamW, {}, {"amsgrad": True}), "other"),
        (make(torch.optim.AdamW, maximize=True), "other"),
        (make(torch.optim.SGD, maximize=True), "other"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_kind(optimizer, kind):
    assert optimizer_kind(optimizer) == kind


def test_adam_with_decoupled_decay_is_adamw():
    try:
        optimizer = make(torch.optim.Adam, weight_decay=0.1, decoupled_weight_decay=True)
    except TypeError:
        pytest.skip("this torch has no Adam(decoupled_weight_decay=)")
    assert optimizer_kind(optimizer) == "adamw"
