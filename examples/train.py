"""Trains a GPT that a YAML file describes, through LightningCLI.

python examples/train.py fit --config examples/gpt.yaml
python examples/train.py fit --config examples/gpt.yaml --trainer.strategy.init_args.pp 4
python examples/train.py validate --config examples/gpt.yaml --ckpt_path runs/gpt/.../last.ckpt
python examples/train.py fit --help
"""

import sysconfig
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI, LRSchedulerCallable, OptimizerCallable
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader

import lightning_mcore  # noqa: F401  # for the short names --trainer.strategy mcore and mcore_cpu

BYTES = 256


class GPT(L.LightningModule):
    """A GPT over bytes; its optimizer and LR schedule come from the YAML file too."""

    def __init__(
        self,
        num_layers: int = 4,
        hidden_size: int = 64,
        num_attention_heads: int = 4,
        seq_length: int = 64,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ):
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])
        self.make_optimizer, self.make_lr_scheduler = optimizer, lr_scheduler
        self.model = None
        # Optional: lets the strategy check the sizes before it starts anything.
        self.model_dims = {
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "num_attention_heads": num_attention_heads,
            "seq_length": seq_length,
        }

    def configure_model(self):
        if self.model is None:
            self.model = self.trainer.strategy.build(self.build_stage)

    def build_stage(self, stage, **fields):
        config = TransformerConfig(
            num_layers=self.hparams.num_layers,
            hidden_size=self.hparams.hidden_size,
            num_attention_heads=self.hparams.num_attention_heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **fields,
        )
        return GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=BYTES,
            max_sequence_length=self.hparams.seq_length,
            pre_process=stage.is_first,
            post_process=stage.is_last,
            vp_stage=stage.vp_stage,
        )

    def step(self, batch, name):  # [b, s + 1]; what follows the model call runs on the last stage
        tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        size = tokens.shape[1]
        positions = torch.arange(size, device=tokens.device).expand_as(tokens)
        masked = torch.ones(1, 1, size, size, dtype=torch.bool, device=tokens.device).triu(1)
        loss = self.model(tokens, positions, masked, labels=labels).mean()
        self.log(name, loss, prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val_loss")

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        schedule = {"scheduler": self.make_lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class SourceCode(L.LightningDataModule):
    """Windows of the source files of Python's standard library, as bytes."""

    def __init__(self, seq_length: int = 64, batch_size: int = 16, samples: int = 2000):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(path.read_bytes() for path in sources[:50])
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        size = self.hparams.seq_length
        windows = data.unfold(0, size + 1, size)[: self.hparams.samples]
        held_out = len(windows) // 10
        self.train, self.val = windows[:-held_out], windows[-held_out:]

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)


def main():
    # The model makes its optimizer itself: parameters exist after configure_model only.
    LightningCLI(
        GPT,
        SourceCode,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
