"""Trains a byte-level GPT on the source of Python's standard library, cut over four processes."""

import math
import sysconfig
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader

from lightning_mcore import MCoreStrategy
from lightning_mcore.callbacks import ModelSummary, OptimizerStats, Throughput

STEPS, BATCH, SEQ, BYTES = 240, 16, 128, 256


class GPT(L.LightningModule):
    # Optional: lets the strategy check the sizes before it starts anything.
    model_dims = {"num_layers": 4, "num_attention_heads": 4, "seq_length": SEQ}

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr, self.model = lr, None

    def configure_model(self):
        def build(stage, **fields):
            sizes = {"num_layers": 4, "num_attention_heads": 4, "hidden_size": 128}
            config = TransformerConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0, **fields)
            spec = get_gpt_layer_local_spec()
            place = {"pre_process": stage.is_first, "post_process": stage.is_last}
            return GPTModel(config, spec, BYTES, SEQ, **place, vp_stage=stage.vp_stage)

        if self.model is None:
            self.model = self.trainer.strategy.build(build)

    def loss(self, tokens):  # [b, s + 1]; what follows the model call runs on the last stage
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(SEQ, device=tokens.device).expand_as(inputs)
        masked = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool, device=tokens.device).triu(1)
        return self.model(inputs, positions, masked, labels=labels).mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(  # warm-up, then a cosine
            optimizer, lambda i: min((i + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * i / STEPS))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8)
    windows = text.long().unfold(0, SEQ + 1, SEQ)  # one token more, since labels are shifted by one
    share = text.bincount(minlength=BYTES).double() / len(text)
    entropy = -torch.xlogy(share, share).sum().item()

    gpus = torch.cuda.device_count()
    tp, pp, vpp = (2, 2, 2) if gpus == 0 or gpus >= 4 else (1, 2, 2) if gpus > 1 else (1, 1, None)
    best = ModelCheckpoint(monitor="val_loss", filename="{step}")
    rate = Throughput(tokens=lambda batch: batch[:, 1:].numel())
    trainer = L.Trainer(
        accelerator="gpu" if gpus else "cpu",
        devices=tp * pp,
        strategy=MCoreStrategy(tp, pp, vpp, overlap_p2p=pp > 1, micro_batch_size=BATCH // 2),
        max_epochs=1,
        limit_train_batches=STEPS,
        val_check_interval=STEPS // 2,
        limit_val_batches=8,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=TensorBoardLogger("runs", name="quickstart"),
        callbacks=[best, LearningRateMonitor("step"), rate, OptimizerStats(), ModelSummary()],
    )
    train, val = windows[:-2000], windows[-2000:]
    trainer.fit(GPT(), DataLoader(train, BATCH, shuffle=True), DataLoader(val, BATCH))
    if trainer.is_global_zero:
        losses = {name: value.item() for name, value in trainer.callback_metrics.items()}
        print(f"\nRan on {tp * pp} {'GPU' if gpus else 'CPU'} ranks: tp={tp} pp={pp} vpp={vpp}")
        print(f"Entropy of single bytes: {entropy:.3f} (the loss of a model that ignores context)")
        print("Last losses: train {train_loss:.3f}, validation {val_loss:.3f}".format(**losses))
        print(f"Checkpoint: {best.best_model_path}")
        print(f"Curves: tensorboard --logdir {trainer.logger.log_dir}")


if __name__ == "__main__":
    main()
