"""What the engine is lent of TransformerEngine, and that it is put back."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from megatron.core.tensor_parallel import layers as engine_layers
from megatron.core.transformer import attention as engine_attention

from lightning_mcore._mcore.te_bindings import te_split_of_qkv, te_stands_in_for_apex


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_loses_its_stand_in_for_apex(fails: bool) -> None:
    before = dict(vars(engine_layers))
    try:
        with te_stands_in_for_apex():
            assert engine_layers._grad_accum_fusion_available
            assert callable(engine_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert dict(vars(engine_layers)) == before


@pytest.mark.parametrize(
    ("has_te", "names", "lent"),
    [(True, ["SplitAlongDim"], True), (True, [], False), (False, ["SplitAlongDim"], False)],
)
def test_attention_gets_te_s_split_where_there_is_one(monkeypatch, has_te, names, lent) -> None:
    """TransformerEngine's modules stand in for themselves: they need a GPU to be imported."""
    split = SimpleNamespace(apply=lambda *_: "split")
    utils = ModuleType("transformer_engine.pytorch.utils")
    vars(utils).update(dict.fromkeys(names, split))
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setattr(engine_attention, "HAVE_TE", has_te)
    before = dict(vars(engine_attention))
    with te_split_of_qkv():
        assert engine_attention.SplitAlongDim is (split.apply if lent else None)
    assert dict(vars(engine_attention)) == before


def test_a_split_that_the_engine_found_stays(monkeypatch) -> None:
    monkeypatch.setattr(engine_attention, "HAVE_TE", True)
    monkeypatch.setattr(engine_attention, "SplitAlongDim", "its own")
    with te_split_of_qkv():
        assert engine_attention.SplitAlongDim == "its own"
