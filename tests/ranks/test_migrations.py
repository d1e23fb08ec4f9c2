"""Ordinary Lightning projects written for DDP, moved here by their strategy line alone."""

import re
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from lightning_mcore import ConfigurationError, MCoreStrategy
from lightning_mcore.testing import run_ranks

# ---------------------------------------------------------------------- an image classifier


class DigitClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )
        self.val_accuracy = Accuracy(task="multiclass", num_classes=10)

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, digits = batch
        loss = F.cross_entropy(self(images), digits)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, digits = batch
        logits = self(images)
        self.val_accuracy(logits, digits)
        self.log("val_loss", F.cross_entropy(logits, digits), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)]


class Digits(L.LightningDataModule):
    """Synthetic digits: a glyph per class, moved and with noise."""

    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        glyphs = (torch.rand(10, 5, 5, generator=generator) > 0.5).float()

        def draw(count):
            digits = torch.randint(0, 10, (count,), generator=generator)
            images = 0.1 * torch.randn(count, 1, 9, 9, generator=generator)
            corners = torch.randint(0, 5, (count, 2), generator=generator).tolist()
            for image, digit, (row, column) in zip(images, digits.tolist(), corners, strict=True):
                image[0, row : row + 5, column : column + 5] += glyphs[digit]
            return TensorDataset(images, digits)

        self.train, self.val = draw(96), draw(32)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=12, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)


def classify_images(strategy):
    trainer = L.Trainer(strategy=strategy, max_epochs=3, **COMMON, callbacks=[record := Losses()])
    trainer.fit(DigitClassifier(), datamodule=Digits())
    return record.seen


# ---------------------------------------------------------------------- a text classifier


class TextClassifier(L.LightningModule):
    def __init__(self, vocab=32, width=24, length=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens) + self.position).mean(1))

    def step(self, batch, name):
        loss = F.cross_entropy(self(batch["tokens"]), batch["label"])
        self.log(name, loss, sync_dist=True, prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val_loss")

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-3}]
        optimizer = torch.optim.AdamW(groups, lr=5e-3, weight_decay=0.0)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warmup, "interval": "step"},
        }


class Reviews(torch.utils.data.Dataset):
    """Sentences whose label is whether "good" words outnumber the others."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 32, (count, 10), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"tokens": tokens, "label": ((tokens < 16).sum() > 5).long()}


def classify_text(strategy):
    trainer = L.Trainer(
        strategy=strategy,
        max_epochs=2,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        val_check_interval=4,
        **COMMON,
        callbacks=[record := Losses()],
    )
    trainer.fit(
        TextClassifier(),
        DataLoader(Reviews(128, seed=0), batch_size=8, shuffle=True),
        DataLoader(Reviews(32, seed=1), batch_size=16),
    )
    return record.seen


# ---------------------------------------------------------------------- a GAN


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        for_generator, for_discriminator = self.optimizers()
        fake = self.generator(torch.randn(len(real), 4, device=self.device))
        ones = torch.ones(len(real), 1, device=self.device)

        self.toggle_optimizer(for_generator)
        loss = F.binary_cross_entropy_with_logits(self.discriminator(fake), ones)
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        right = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        wrong = F.binary_cross_entropy_with_logits(self.discriminator(fake.detach()), 0 * ones)
        for_discriminator.zero_grad()
        self.manual_backward(right + wrong)
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)
        self.log("train_loss", loss + right + wrong, sync_dist=True)

    def configure_optimizers(self):
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in parts]


def train_gan(strategy):
    trainer = L.Trainer(strategy=strategy, max_epochs=1, **COMMON, callbacks=[record := Losses()])
    circle = torch.linspace(0, 6.28, 32)
    data = TensorDataset(torch.stack([circle.cos(), circle.sin()], dim=1))
    try:
        trainer.fit(GAN(), DataLoader(data, batch_size=8))
    except ConfigurationError as error:
        return str(error)
    return record.seen


# ---------------------------------------------------------------------- the comparison

COMMON = {
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Losses(Callback):
    """Keeps what was logged, after every training step and every validation."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(("train", float(trainer.callback_metrics["train_loss"])))

    def on_validation_end(self, trainer, module):
        names = ("val_loss", "val_accuracy")
        self.seen += [
            (name, float(value))
            for name, value in trainer.callback_metrics.items()
            if name in names
        ]


def run_example(example, strategy):
    L.seed_everything(1)
    return example(MCoreStrategy() if strategy == "mcore" else strategy)


def losses(example, strategy):
    first, second = run_ranks(run_example, 2, example, strategy)
    assert first == second, "ranks disagree about what was logged"
    return first


@pytest.mark.parametrize(
    ("example", "train_steps"), [(classify_images, 12), (classify_text, 16)], ids=["image", "text"]
)
def test_losses_equal_those_of_ddp(example, train_steps):
    under_ddp = losses(example, "ddp")
    under_mcore = losses(example, "mcore")

    assert [name for name, _ in under_mcore] == [name for name, _ in under_ddp]
    assert sum(name == "train" for name, _ in under_ddp) == train_steps
    assert [v for _, v in under_mcore] == pytest.approx([v for _, v in under_ddp], abs=1e-5)
    assert under_ddp[-1] != under_ddp[0], "training changed nothing"


def test_a_gan_trains_under_ddp_and_is_refused_with_the_way_out():
    # Each of a GAN's two losses leaves the other model's parameters out.
    assert len(losses(train_gan, "ddp_find_unused_parameters_true")) == 2
    refusal = losses(train_gan, "mcore")
    assert "`automatic_optimization` (False)" in refusal
    assert "use automatic optimization" in refusal
    assert "DDPStrategy" in refusal


# ---------------------------------------------------------------------- the documented steps

GUIDE = Path(__file__).parents[2] / "docs" / "migrating.md"


def guide():
    """Everything that the guide's code defines, and the strategies that it makes, in order."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    names, strategies = {}, []
    for block in blocks:
        names.pop("strategy", None)
        exec(compile(block, str(GUIDE), "exec"), names)
        if "strategy" in names:
            strategies.append(names["strategy"])
    return names, strategies


def follow_guide(step):
    """Train losses of one step of the guide; ``None`` is where it starts, under DDP."""
    names, strategies = guide()
    module = {None: "LanguageModel", 0: "LanguageModel", 3: "MegatronModel"}.get(
        step, "PipelinedModel"
    )
    copies = 1 if step in (1, 2, 3) else 2
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy="ddp" if step is None else strategies[step],
        max_epochs=2,
        use_distributed_sampler=False,
        **COMMON,
        callbacks=[record := Losses()],
    )
    rows = torch.arange(24)[:, None] + torch.arange(17)
    data = TensorDataset(rows[:, :-1] % 64, rows[:, 1:] % 64)
    # The same global batches of 8 whatever the number of copies of the model.
    mine = range(trainer.global_rank % copies, 24, copies)
    loader = DataLoader(torch.utils.data.Subset(data, mine), batch_size=8 // copies)
    trainer.fit(names[module](), loader)
    return [value for _, value in record.seen]


@pytest.mark.parametrize("step", [0, 1, 2, 3], ids=["dp", "pp", "pp vpp", "tp"])
def test_the_guides_steps_run(step):
    first, second = run_ranks(follow_guide, 2, step)
    assert first == second
    assert len(first) == 6
    assert first[3:] < first[:3], "the second pass over the data is no better than the first"
    if step != 3:  # whose model is another one
        (expected, _) = run_ranks(follow_guide, 2, None)
        assert first == pytest.approx(expected, abs=1e-5)
