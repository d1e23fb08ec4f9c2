"""Trains a small Qwen3-MoE-like model on the source of Python's standard library, experts spread.

python examples/moe.py             # ep=2: two processes, each with half of the experts
python examples/moe.py --pp 2      # ep=2 x pp=2: four processes
"""

import argparse
import sysconfig
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader

from lightning_mcore import MCoreStrategy
from lightning_mcore.callbacks import MoEStats

BATCH, SEQ, BYTES, LAYERS, EXPERTS = 8, 64, 256, 4, 8


class MoE(L.LightningModule):
    model_dims = {"num_layers": LAYERS, "num_moe_experts": EXPERTS, "seq_length": SEQ}

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr, self.model = lr, None

    def configure_model(self):
        def build(stage, **fields):
            config = TransformerConfig(
                num_layers=LAYERS,
                hidden_size=64,
                num_attention_heads=4,
                num_query_groups=2,
                kv_channels=32,
                num_moe_experts=EXPERTS,
                moe_ffn_hidden_size=96,
                moe_router_topk=2,
                moe_router_pre_softmax=False,  # probabilities over the chosen experts
                moe_router_dtype="fp32",
                moe_router_load_balancing_type="aux_loss",
                moe_aux_loss_coeff=1e-2,
                gated_linear_unit=True,
                activation_func=torch.nn.functional.silu,
                normalization="RMSNorm",
                qk_layernorm=True,
                add_bias_linear=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                **fields,  # sizes, dtypes, and the dispatcher that the strategy chose
            )
            spec = get_gpt_layer_local_spec(
                num_experts=EXPERTS, qk_layernorm=True, normalization="RMSNorm"
            )
            place = {"pre_process": stage.is_first, "post_process": stage.is_last}
            rotary = {"position_embedding_type": "rope", "vp_stage": stage.vp_stage}
            return GPTModel(config, spec, BYTES, SEQ, **place, **rotary)

        if self.model is None:
            self.model = self.trainer.strategy.build(build)

    def training_step(self, tokens, batch_idx):  # [b, s + 1]
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(SEQ, device=tokens.device).expand_as(inputs)
        masked = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool, device=tokens.device).triu(1)
        loss = self.model(inputs, positions, masked, labels=labels).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    args = parser.parse_args()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8)
    windows = text.long().unfold(0, SEQ + 1, SEQ)
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.device_count() >= 2 * args.pp else "cpu",
        devices=2 * args.pp,
        strategy=MCoreStrategy(pp=args.pp, ep=2, micro_batch_size=BATCH // 4),
        max_steps=args.steps,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        enable_checkpointing=False,
        logger=TensorBoardLogger("runs", name="moe"),
        callbacks=[MoEStats(per_layer=True)],
    )
    trainer.fit(MoE(), DataLoader(windows, BATCH, shuffle=True))
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    if trainer.is_global_zero:
        print(f"Last loss {values['train_loss']:.3f}")
        print(f"Fullest expert over the mean: {values['moe/expert_imbalance']:.2f}")
        print(f"Fullest rank over the mean: {values['moe/rank_imbalance']:.2f}")
    return values


if __name__ == "__main__":
    main()
