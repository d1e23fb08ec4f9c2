"""The summary's totals are those of the whole model under every layout."""

import logging
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_mcore.callbacks import ModelSummary
from lightning_mcore.testing import run_ranks
from tests.gpt import GPT, token_dataset
from tests.ranks.trainers import SIZES, make_trainer, ranks_of


class PartlyFrozenGPT(GPT):
    """With a frozen layer in the model and a frozen teacher beside it."""

    def configure_model(self):
        super().configure_model()
        self.teacher = nn.Linear(5, 5).requires_grad_(False)
        for chunk in self.model.chunks:
            for name, param in chunk.named_parameters():
                if ".mlp." in name:
                    param.requires_grad_(False)


def summary(strategy, tied):
    """What this rank printed."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    for name in ("lightning.pytorch.callbacks.model_summary", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("lightning.pytorch.callbacks.model_summary").addHandler(handler)
    trainer = make_trainer(
        strategy, max_steps=1, callbacks=[ModelSummary()], enable_model_summary=True
    )
    trainer.fit(PartlyFrozenGPT(tied=tied), DataLoader(token_dataset(4), batch_size=4))
    return "\n".join(lines)


def totals(text):
    """The lines below the table that count parameters."""
    found = {
        label: re.search(rf"([\d.,]+ ?[KMB]?)\s+{label}", text)
        for label in (
            "Trainable params",
            "Non-trainable params",
            "Total params",
            r"Total estimated model params size \(MB\)",
        )
    }
    return {label: match and match.group(1).strip() for label, match in found.items()}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def whole(request):
    (text,) = run_ranks(summary, 1, {}, request.param)
    return request.param, text


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2pp2", "dp2"])
def test_totals_equal_those_of_one_process(layout, whole):
    tied, expected = whole
    first, *others = run_ranks(summary, ranks_of(layout), SIZES[layout], tied)

    assert all(totals(expected).values()), expected
    assert totals(first) == totals(expected)
    assert others == [""] * len(others), "only global rank zero prints"
    assert ("Params on rank 0" in first) == (layout != "dp2")


def test_one_process_counts_as_torch_does(whole):
    tied, text = whole
    assert "Params on rank 0" not in text
    if tied:
        return
    from tests.gpt import HIDDEN, LAYERS, SEQ, VOCAB

    layer = 12 * HIDDEN**2 + 13 * HIDDEN
    expected = LAYERS * layer + 2 * VOCAB * HIDDEN + SEQ * HIDDEN + 2 * HIDDEN + 30
    assert totals(text)["Total params"] == f"{expected / 1000:.1f} K"


def test_other_strategies_get_the_summary_of_lightning():
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        fast_dev_run=1,
        callbacks=[callback := ModelSummary()],
        enable_progress_bar=False,
    )
    trainer.fit(BoringModel())
    assert callback._count is None
    assert isinstance(trainer.model.layer.weight, torch.nn.Parameter)
