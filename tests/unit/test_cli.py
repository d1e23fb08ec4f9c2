"""The command's arguments and answers, on checkpoints made by one process."""

import json
import pickle
import subprocess
import sys

import pytest
import torch

from lightning_mcore import names
from lightning_mcore.cli import main
from lightning_mcore.errors import CheckpointError
from lightning_mcore.export import export_checkpoint
from lightning_mcore.plain_file import read_plain
from lightning_mcore.safetensors_file import read_safetensors, write_safetensors
from lightning_mcore.stored import StoredCheckpoint


@pytest.fixture
def weights():
    return {
        "layer.weight": torch.arange(6.0).reshape(2, 3),
        "layer.flag": torch.tensor(True),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
    }


@pytest.fixture
def plain(tmp_path, weights):
    path = tmp_path / "plain.pt"
    torch.save({"state_dict": weights, "global_step": 7, "callbacks": {"a": 1}}, path)
    return path


@pytest.fixture
def checkpoint(tmp_path, plain):
    path = tmp_path / "last.ckpt"
    assert main(["import", str(plain), str(path)]) == 0
    return path


def test_inspect(checkpoint, capsys):
    assert main(["inspect", str(checkpoint), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "step       7, epoch 0" in text
    assert "10 elements in 4 tensors, 31 bytes" in text
    assert "none (weights only)" in text
    assert "inner.layer.weight  [2, 3]  float32" in text


def test_inspect_reads_no_tensor(checkpoint, monkeypatch):
    monkeypatch.setattr(torch, "load", None)
    assert main(["inspect", str(checkpoint)]) == 0


@pytest.mark.parametrize("how", ["remove", "cut", "index"])
def test_inspect_names_what_is_missing(checkpoint, capsys, how):
    shard = next(checkpoint.glob("*.distcp"))
    if how == "remove":
        shard.unlink()
    elif how == "cut":
        shard.write_bytes(shard.read_bytes()[:-10])
    else:  # the manifest agrees with the disk, the index does not
        shard.write_bytes(shard.read_bytes()[:10])
        manifest = checkpoint / "lightning_mcore.json"
        said = json.loads(manifest.read_text())
        said["files"][shard.name] = 10
        manifest.write_text(json.dumps(said))
    assert main(["inspect", str(checkpoint)]) == 1
    told = capsys.readouterr().err
    assert "is incomplete" in told
    assert shard.name in told


@pytest.mark.parametrize("name", ["nothing.ckpt", "plain.pt"])
def test_what_is_no_checkpoint(plain, capsys, name):
    assert main(["inspect", str(plain.with_name(name))]) == 1
    assert name in capsys.readouterr().err


def test_round_trips(checkpoint, weights, tmp_path):
    for name in ("out.safetensors", "out.pt"):
        assert main(["export", str(checkpoint), str(tmp_path / name), "--weights-only"]) == 0
        found = read_plain(tmp_path / name)
        assert sorted(found) == sorted(weights)
        for key, value in weights.items():
            assert torch.equal(found[key], value)
            assert found[key].dtype == value.dtype
    assert torch.load(tmp_path / "out.pt", weights_only=True)["global_step"] == 7


def test_export_does_not_overwrite_unasked(checkpoint, tmp_path, capsys):
    out = tmp_path / "out.pt"
    out.write_text("mine")
    assert main(["export", str(checkpoint), str(out)]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main(["export", str(checkpoint), str(out), "--overwrite", "--prefix=net."]) == 0
    assert "net.layer.weight" in read_plain(out)


def test_a_failed_export_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(StoredCheckpoint, "read", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_checkpoint(checkpoint, tmp_path / "new" / "out.safetensors")
    assert not list((tmp_path / "new").iterdir())


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return (print, ("run",))


def test_an_index_cannot_run_code(checkpoint, capsys):
    index = checkpoint / ".metadata"
    size = index.stat().st_size
    index.write_bytes(pickle.dumps(Code()).ljust(size, b"."))
    assert main(["inspect", str(checkpoint)]) == 1
    told = capsys.readouterr()
    assert "builtins.print" in told.err
    assert "run" not in told.out


def test_a_plain_pickle_cannot_run_code(tmp_path, capsys):
    path = tmp_path / "bad.pt"
    torch.save({"state_dict": {"a": torch.ones(1)}, "x": Code()}, path)
    assert main(["import", str(path), str(tmp_path / "new.ckpt")]) == 1
    told = capsys.readouterr()
    assert "print" in told.err
    assert "run\n" not in told.out
    assert not (tmp_path / "new.ckpt").exists()


@pytest.mark.parametrize("command", ["import-hf", "export-hf"])
def test_hugging_face_says_what_to_install(command, capsys):
    if main([command]) == 1:
        assert "pip install megatron-bridge" in capsys.readouterr().err


def test_the_module_is_the_command():
    run = subprocess.run(
        [sys.executable, "-m", "lightning_mcore", "export", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0
    assert "--weights-only" in run.stdout


# ------------------------------------------------------------------------------ safetensors


@pytest.mark.parametrize(
    "spoilt", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x40\0\0\0\0\0\0\0{}"]
)
def test_what_is_no_safetensors_file(tmp_path, spoilt):
    path = tmp_path / "a.safetensors"
    path.write_bytes(spoilt)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        read_safetensors(path)


def test_a_cut_safetensors_file(tmp_path, weights):
    path = tmp_path / "a.safetensors"
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
    write_safetensors(path, shapes, weights.__getitem__, {})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"not a complete safetensors file: .*not fully covered"
    ):
        read_safetensors(path)


# ------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("key", "local", "index", "fused", "separate", "own"),
    [
        (
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.1.input_layernorm.weight",
            (5,),
            "decoder.layers.5.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.5.input_layernorm.weight",
            "decoder.layers.5.input_layernorm.weight",
        ),
        (
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            "decoder.layers.0.mlp.experts.linear_fc1.weight1",
            (2, 3),
            "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight",
            "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight",
            "decoder.layers.2.mlp.experts.linear_fc1.weight3",
        ),
        (
            "decoder.layers.7.mlp.experts.experts.linear_fc2.weight",
            "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight",
            (3,),
            "decoder.layers.7.mlp.experts.local_experts.3.linear_fc2.weight",
            "decoder.layers.7.mlp.experts.local_experts.3.linear_fc2.weight",
            "decoder.layers.7.mlp.experts.local_experts.3.linear_fc2.weight",
        ),
        (
            "output_layer.weight",
            "output_layer.weight",
            (),
            "output_layer.weight",
            "output_layer.weight",
            "output_layer.weight",
        ),
    ],
)
def test_names(key, local, index, fused, separate, own):
    assert names.depth(key) == len(index)
    assert names.fill(names.fused_template(key), index) == fused
    assert names.fill(names.template_of(key, fused_norms=False), index) == separate
    assert names.fill(names.global_template(local, key), index) == own


def test_kinds():
    assert names.kind_of(["inner.a", "inner.b"]) == "plain"
    assert names.kind_of(["blocks.0.weight"]) == "sequential"
    assert names.kind_of(["blocks.weight", "decoder.layers.x"]) == "megatron"
    assert names.split_object_key("a._extra_state/shard_0.3_4.4") == ("a._extra_state", (0, 3))
