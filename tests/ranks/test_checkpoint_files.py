"""Checkpoints on real ranks: what they hold, which layouts load them, what survives a fault."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import nn

from lightning_mcore import checkpoint_files, optimizer_state, state_dict
from lightning_mcore._mcore import checkpointing, engine
from lightning_mcore._mcore.cpu import CpuAdapter
from lightning_mcore.checkpoint import (
    TrainState,
    is_checkpoint,
    load_checkpoint,
    load_weights,
    read_manifest,
    save_checkpoint,
    start_save,
)
from lightning_mcore.config import ParallelSizes
from lightning_mcore.errors import CheckpointError
from lightning_mcore.layout import resolve_layout
from lightning_mcore.parallel_state import init_parallel_state, seed_stage
from lightning_mcore.stage import stages_of
from lightning_mcore.testing import RankError, run_ranks
from tests.gpt import SEQ, VOCAB, call_gpt, gpt_chunk

GLOBAL_BATCH = 4
LIGHTNING_STATE = {"epoch": 1, "loops": {"fit": [1, 2.5, None]}, "lr_schedulers": [{"last": 3}]}

# Ranks, sizes and whether the optimizer is distributed.
LAYOUTS = {
    "one": (1, {}, False),
    "dp2": (2, {}, True),
    "dp2plain": (2, {}, False),
    "tp2": (2, {"tp": 2}, False),
    "pp2": (2, {"pp": 2}, True),
    "pp2vpp2": (2, {"pp": 2, "vpp": 2}, True),
    "ep2": (2, {"ep": 2}, True),
    "tp2pp2": (4, {"tp": 2, "pp": 2}, False),
    "tp2dp2": (4, {"tp": 2}, True),
    "pp2ep2": (4, {"pp": 2, "ep": 2}, True),
}


# ------------------------------------------------------------------------------ engine on a rank


def on_rank(function):
    """Runs ``function(layout, groups, ...)`` with groups and the CPU adapter in place."""

    @functools.wraps(function)
    def wrapper(*args, sizes=None, **kwargs):
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo")
        layout = resolve_layout(ParallelSizes(**(sizes or {})), world_size, rank)
        with CpuAdapter():
            state = init_parallel_state(
                layout, device=torch.device("cpu"), timeout_s=60, batched_p2p=True
            )
            seed_stage(state)
            result = function(layout, state.groups, *args, **kwargs)
            dist.barrier()
            return result

    return wrapper


def store_transposed(chunk):
    """Stores the output layer transposed, as ``GroupedMLP`` does with its experts: a copy."""
    describe = chunk.sharded_state_dict

    def build(key, tensor, replica_id, flattened_range):
        copied = tensor.t().contiguous()
        return ShardedTensor.from_rank_offsets(key, copied, replica_id=replica_id)

    def with_copy(*args, **kwargs):
        tree = describe(*args, **kwargs)
        leaf = tree["output_layer.weight"]
        parts = (leaf.key, leaf.data, build, torch.t, leaf.replica_id)
        return {**tree, "output_layer.weight": ShardedTensorFactory(*parts)}

    chunk.sharded_state_dict = with_copy


def build_gpt(
    layout, *, distributed, seed, optimizer="engine", bf16=False, transposed=False, **model
):
    """Chunks as a user built them, the same wrapped, and the optimizer over two groups."""
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if bf16 else torch.float32
    fields = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "overlap_p2p_comm": layout.vpp is not None,
        "batch_p2p_comm": layout.vpp is None,
        "deallocate_pipeline_outputs": False,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": bf16,
        # The engine trains experts under tp with sequence parallelism only.
        "sequence_parallel": layout.tp > 1 and bool(model.get("experts")),
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
    }
    chunks = [
        gpt_chunk(is_first=s.is_first, is_last=s.is_last, vp_stage=s.vp_stage, **model, **fields)
        for s in stages_of(layout)
    ]
    if transposed:
        store_transposed(chunks[-1])
    config = chunks[0].config
    wrapped = engine.wrap_ddp(
        [engine.to_model_precision(chunk, config) for chunk in chunks],
        config,
        {"use_distributed_optimizer": distributed, "grad_reduce_in_fp32": True},
    )
    settings = engine.optimizer_config(
        {
            "optimizer": "adam",
            "lr": 1e-2,
            "weight_decay": 0.01,
            "clip_grad": 1.0,
            "bf16": bf16,
            "params_dtype": dtype,
            "use_distributed_optimizer": distributed,
        }
    )
    params = [param for chunk in chunks for param in chunk.parameters()]
    matrices = [param for param in params if param.dim() > 1]
    vectors = [param for param in params if param.dim() < 2]
    if optimizer == "engine":
        made = engine.build_optimizer(settings, wrapped, [matrices, vectors])
    else:
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        torch_optimizer = getattr(torch.optim, optimizer)(groups, lr=1e-2)
        made = engine.wrap_torch_optimizer(torch_optimizer, settings)
    engine.set_schedule_hooks(config, wrapped, made, overlap=False)
    return chunks, wrapped, made


def train(layout, groups, wrapped, optimizer, steps):
    """Trains on ``steps``, global batches numbered alike in every layout; the losses."""
    losses = []
    for step in steps:
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        count = GLOBAL_BATCH // layout.dp

        def samples(step=step, count=count):
            for index in range(count):
                number = step * GLOBAL_BATCH + index * layout.dp + layout.dp_rank
                generator = torch.Generator().manual_seed(number)
                yield torch.randint(0, VOCAB, (1, SEQ + 1), generator=generator)

        def forward(iterator, chunk):
            tokens = next(iterator)
            output = call_gpt(chunk, tokens[:, :-1], tokens[:, 1:])
            return output, lambda out: (out.float().mean(), out.detach().float().mean())

        outputs = engine.run_schedule(
            forward,
            wrapped,
            [samples() for _ in wrapped],
            num_microbatches=count,
            seq_length=SEQ,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        counts = layout.is_last_stage and layout.tp_rank == 0
        total = torch.stack(outputs).sum() if counts else torch.zeros(())
        dist.all_reduce(total, group=groups.world_cpu)
        losses.append(float(total) / GLOBAL_BATCH)
    return losses


def whole_state(layout, groups, chunks, optimizer):
    """Every tensor of model and optimizer, put together from the shards of all ranks."""
    metadata = checkpointing.sharding_metadata(groups.dp_cp)
    model = state_dict.model_tree(chunks, layout, metadata)
    tree = {**model}
    if optimizer is not None:
        tree["optimizer"] = optimizer_state.optimizer_tree(optimizer, model, groups.world_cpu)
    local = [
        (leaf.key, leaf.global_shape, leaf.global_offset, leaf.prepend_axis_num, leaf.data.detach())
        for leaf in checkpointing.tensors_of(checkpointing.build(tree))
    ]
    everyone = [None] * layout.world_size
    dist.all_gather_object(everyone, local, group=groups.world_cpu)
    whole = {}
    for key, shape, offset, layers, data in (shard for one in everyone for shard in one):
        target = whole.setdefault(key, torch.full(shape, float("nan"), dtype=torch.float32))
        data = data.float().reshape((1,) * layers + tuple(data.shape))
        place = tuple(slice(o, o + s) for o, s in zip(offset, data.shape, strict=True))
        target[place] = data
    return whole


def assert_same_state(one, other):
    """Equal to the bit wherever both have a tensor; only main parameters may be on one side."""
    for key in one.keys() & other.keys():
        assert not one[key].isnan().any(), f"no rank holds all of {key}"
        assert torch.equal(one[key], other[key]), key
    for key in one.keys() ^ other.keys():
        assert key.startswith(("optimizer.state.param.", "optimizer.state.fp32_param.")), key
    assert "embedding.word_embeddings.weight" in one
    assert "optimizer.state.exp_avg.embedding.word_embeddings.weight" in one


@on_rank
def save_gpt(layout, groups, path, *, distributed, **model):
    """Two steps, a checkpoint, two more steps: the state at the checkpoint, the later losses."""
    chunks, wrapped, optimizer = build_gpt(layout, distributed=distributed, seed=1, **model)
    train(layout, groups, wrapped, optimizer, range(2))
    whole = whole_state(layout, groups, chunks, optimizer)
    save_checkpoint(
        path,
        TrainState(chunks, optimizer, {"place": layout.rank * 10}),
        LIGHTNING_STATE,
        layout=layout,
        groups=groups,
        info={"precision": "32-true", "global_step": 2},
    )
    return whole, train(layout, groups, wrapped, optimizer, range(2, 4))


@on_rank
def load_gpt(layout, groups, path, *, distributed, **model):
    """The same after loading into other weights."""
    chunks, wrapped, optimizer = build_gpt(layout, distributed=distributed, seed=77, **model)
    state = TrainState(chunks, optimizer, {"place": None})
    lightning_state = load_checkpoint(
        path, state, load_optimizer=True, strict=True, layout=layout, groups=groups
    )
    assert lightning_state == LIGHTNING_STATE
    whole = whole_state(layout, groups, chunks, optimizer)
    losses = train(layout, groups, wrapped, optimizer, range(2, 4))
    return whole, losses, state.extra["place"]


def check_pair(tmp_path, saved, loaded, tolerance=1e-5, **model):
    path = str(tmp_path / "last.ckpt")
    count, sizes, distributed = LAYOUTS[saved]
    whole, losses = run_ranks(save_gpt, count, path, sizes=sizes, distributed=distributed, **model)[
        0
    ]
    assert is_checkpoint(path)
    for target in loaded:
        count, sizes, distributed = LAYOUTS[target]
        results = run_ranks(load_gpt, count, path, sizes=sizes, distributed=distributed, **model)
        for rank, (other, later, place) in enumerate(results):
            assert_same_state(whole, other)
            if target == saved:
                assert later == losses
            else:
                assert later == pytest.approx(losses, abs=tolerance)
            same = LAYOUTS[target][:2] == LAYOUTS[saved][:2]
            assert place == (rank * 10 if same else None)


# ------------------------------------------------------------------------------ any layout


@pytest.mark.parametrize("saved", ["dp2", "tp2", "pp2", "pp2vpp2"])
def test_two_ranks_load_what_any_two_ranks_saved(tmp_path, saved):
    check_pair(tmp_path, saved, ["dp2", "tp2", "pp2", "pp2vpp2", "tp2pp2"])


def test_one_rank_and_two(tmp_path):
    check_pair(tmp_path, "one", ["one", "dp2", "dp2plain", "tp2"])


def test_four_ranks_and_two(tmp_path):
    check_pair(tmp_path, "tp2pp2", ["tp2pp2", "tp2dp2", "dp2", "tp2", "pp2", "pp2vpp2", "one"])


def test_tied_embeddings_over_stages(tmp_path):
    check_pair(tmp_path, "pp2", ["pp2", "dp2", "tp2"], tied=True)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("ep2", ["one", "dp2", "ep2", "tp2", "pp2", "pp2vpp2", "pp2ep2", "tp2pp2"]),
        ("dp2", ["one", "dp2", "ep2"]),
        ("tp2", ["ep2", "tp2"]),
        ("tp2pp2", ["ep2"]),
        ("pp2", ["ep2"]),
        ("pp2vpp2", ["ep2", "pp2ep2"]),
        ("pp2ep2", ["ep2", "pp2ep2"]),
    ],
)
def test_experts(tmp_path, saved, loaded):
    check_pair(tmp_path, saved, loaded, experts=4)


def test_parameters_that_are_stored_in_parts(tmp_path):
    check_pair(tmp_path, "dp2", ["dp2", "tp2"], gated_linear_unit=True)


def test_parameters_that_are_stored_as_copies(tmp_path):
    check_pair(tmp_path, "dp2", ["dp2", "one"], transposed=True)


@pytest.mark.parametrize("saved", ["dp2", "tp2"])
def test_bf16_main_parameters(tmp_path, saved):
    check_pair(tmp_path, saved, ["dp2", "tp2"], bf16=True, tolerance=2e-2)


def test_a_torch_optimizer_that_the_engine_does_not_know(tmp_path):
    check_pair(tmp_path, "dp2plain", ["dp2plain", "tp2"], optimizer="NAdam")


# ------------------------------------------------------------------------------ what is in it


def test_the_manifest_says_what_is_there(tmp_path):
    path = tmp_path / "last.ckpt"
    run_ranks(save_gpt, 2, str(path), sizes={"tp": 2}, distributed=False)
    manifest = read_manifest(path)
    assert manifest["layout"]["tp"] == 2
    assert manifest["layout"]["world_size"] == 2
    assert manifest["precision"] == "32-true"
    assert manifest["global_step"] == 2
    assert manifest["optimizer"] is True
    assert manifest["versions"]["megatron-core"] == engine.ENGINE_VERSION
    on_disk = {str(p.relative_to(path)): p.stat().st_size for p in path.rglob("*") if p.is_file()}
    assert on_disk.pop("lightning_mcore.json") > 0
    assert manifest["files"] == on_disk
    assert {p.name for p in tmp_path.iterdir()} == {"last.ckpt"}


@on_rank
def load_by_engine(layout, groups, path):
    """The files are the engine's format: its own loader reads them."""
    from megatron.core import dist_checkpointing

    chunks, _, _ = build_gpt(layout, distributed=False, seed=3)
    tree = {"model": chunks[0].sharded_state_dict()}
    loaded = dist_checkpointing.load(tree, path)
    return loaded["model"]["embedding.word_embeddings.weight"].detach()


def test_the_engine_reads_the_files(tmp_path):
    path = str(tmp_path / "last.ckpt")
    whole, _ = run_ranks(save_gpt, 2, path, sizes={"pp": 2}, distributed=True)[0]
    loaded = run_ranks(load_by_engine, 1, path)[0]
    assert torch.equal(loaded, whole["embedding.word_embeddings.weight"])


@on_rank
def draw_around_a_checkpoint(layout, groups, path, load):
    """Numbers from every random stream after saving, or after loading into other streams."""
    chunks, _, optimizer = build_gpt(layout, distributed=False, seed=layout.rank)
    random.seed(layout.rank + 5 * load)
    np.random.seed(layout.rank + 5 * load)
    torch.manual_seed(layout.rank + 5 * load)
    state = TrainState(chunks, optimizer)
    places = {"layout": layout, "groups": groups}
    if load:
        load_checkpoint(path, state, load_optimizer=True, strict=True, **places)
    else:
        save_checkpoint(path, state, {}, info={}, **places)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        dropout = torch.rand(2).tolist()
    return random.random(), float(np.random.rand()), torch.rand(2).tolist(), dropout


def test_random_streams_go_on_at_the_same_layout_only(tmp_path):
    path = str(tmp_path / "last.ckpt")
    saved = run_ranks(draw_around_a_checkpoint, 2, path, False, sizes={"tp": 2})
    same = run_ranks(draw_around_a_checkpoint, 2, path, True, sizes={"tp": 2})
    assert same == saved
    other = run_ranks(draw_around_a_checkpoint, 2, path, True, sizes={"pp": 2})
    assert all(a[0] != b[0] for a, b in zip(saved, other, strict=True))


# ------------------------------------------------------------------------------ plain modules


class Blocks(nn.Module):
    """A stage of plain layers, named by their place in the whole model."""

    def __init__(self, indices, width=6):
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): self.block(width) for i in indices})

    @staticmethod
    def block(width):
        return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x


def build_blocks(layout, seed, optimizer="AdamW"):
    torch.manual_seed(seed)
    per_stage = 4 // layout.pp
    chunk = Blocks(range(layout.pp_rank * per_stage, (layout.pp_rank + 1) * per_stage))
    chunk.register_buffer("scratch", torch.rand(3), persistent=False)
    settings = engine.optimizer_config({"optimizer": "adam", "lr": 1e-2})
    made = getattr(torch.optim, optimizer)(chunk.parameters(), lr=1e-2)
    return chunk, made, engine.wrap_torch_optimizer(made, settings)


def steps_on_blocks(chunk, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        data = torch.rand(8, 6, generator=torch.Generator().manual_seed(step))
        chunk(data).square().sum().backward()
        optimizer.step()


@on_rank
def plain_blocks(layout, groups, path, load, optimizer="AdamW", steps=3):
    chunk, inner, wrapped = build_blocks(layout, seed=9 if load else 1, optimizer=optimizer)
    state = TrainState([chunk], wrapped)
    places = {"layout": layout, "groups": groups}
    if load:
        load_checkpoint(path, state, load_optimizer=True, strict=True, **places)
    else:
        steps_on_blocks(chunk, inner, steps)
        inner.param_groups[0]["lr"] = 5e-3
        save_checkpoint(path, state, {}, info={}, **places)
    names = {param: name for name, param in chunk.named_parameters()}
    entries = {names[p]: dict(s) for p, s in inner.state.items()}
    saved = {name: tensor.clone() for name, tensor in chunk.state_dict().items()}
    saved_entries = json.loads(json.dumps(entries, default=lambda t: t.tolist()))
    steps_on_blocks(chunk, inner, 1)
    later = {name: tensor.clone() for name, tensor in chunk.state_dict().items()}
    return saved, saved_entries, inner.param_groups[0]["lr"], later


@pytest.fixture(scope="module")
def saved_blocks(tmp_path_factory):
    """A checkpoint of two stages of plain layers, not to be changed."""
    path = tmp_path_factory.mktemp("saved") / "last.ckpt"
    run_ranks(plain_blocks, 2, str(path), False, sizes={"pp": 2})
    return path


@pytest.fixture
def own_copy(saved_blocks, tmp_path):
    """A copy of it, alone in its directory."""
    return Path(shutil.copytree(saved_blocks, tmp_path / "last.ckpt"))


def merged(results, index):
    return {name: value for result in results for name, value in result[index].items()}


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "NAdam"])
def test_plain_modules_and_torch_optimizers(tmp_path, optimizer):
    path = str(tmp_path / "last.ckpt")
    saved = run_ranks(plain_blocks, 2, path, False, optimizer, sizes={"pp": 2})
    assert all(not name.startswith("scratch") for name in merged(saved, 0))
    for count, sizes in ((2, {"pp": 2}), (1, {}), (2, {})):
        loaded = run_ranks(plain_blocks, count, path, True, optimizer, sizes=sizes)
        before, after = merged(saved, 0), merged(loaded, 0)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert merged(loaded, 1) == merged(saved, 1)
        assert all(result[2] == 5e-3 for result in loaded)
        if sizes:
            later, reloaded = merged(saved, 3), merged(loaded, 3)
            assert all(torch.equal(later[name], reloaded[name]) for name in later)


def test_an_optimizer_that_has_not_stepped(tmp_path):
    path = str(tmp_path / "last.ckpt")
    saved = run_ranks(plain_blocks, 1, path, False, "AdamW", 0)
    loaded = run_ranks(plain_blocks, 1, path, True)
    assert all(torch.equal(saved[0][3][name], loaded[0][3][name]) for name in saved[0][3])


# ------------------------------------------------------------------------------ what does not fit


@on_rank
def messages_for_other_models(layout, groups, path):
    """What loading says to models that are not the one that was saved."""
    places = {"layout": layout, "groups": groups}

    def attempt(chunk, strict=True):
        try:
            load_weights(path, [chunk], strict=strict, **places)
        except CheckpointError as error:
            return str(error)
        return None

    found = {
        "more": attempt(Blocks(range(5))),
        "fewer": attempt(Blocks(range(3))),
        "wider": attempt(Blocks(range(4), width=7)),
        "wider, not strict": attempt(Blocks(range(4), width=7), strict=False),
    }
    bigger = Blocks(range(5))
    before = {name: tensor.clone() for name, tensor in bigger.state_dict().items()}
    found["more, not strict"] = attempt(bigger, strict=False)
    changed = {n for n, t in bigger.state_dict().items() if not torch.equal(t, before[n])}
    weights_only = {"load_optimizer": True, "strict": True}
    chunk, _, wrapped = build_blocks(layout, 1)
    save_checkpoint(f"{path}.weights", TrainState([chunk]), {}, info={}, **places)
    try:
        load_checkpoint(f"{path}.weights", TrainState([chunk], wrapped), **weights_only, **places)
    except CheckpointError as error:
        found["no optimizer"] = str(error)
    return found, changed


def test_what_does_not_fit_is_listed_by_name(own_copy):
    results = run_ranks(messages_for_other_models, 2, str(own_copy))
    for found, changed in results:
        assert "keys of the model are missing in the checkpoint" in found["more"]
        assert "blocks.4.0.weight" in found["more"]
        assert "keys of the checkpoint are not in the model" in found["fewer"]
        assert "blocks.3.0.weight" in found["fewer"]
        assert "blocks.0.0.weight: [6, 6] in the checkpoint, [7, 7] in the model" in found["wider"]
        assert "[7, 7] in the model" in found["wider, not strict"]
        assert found["more, not strict"] is None
        assert any(name.startswith("blocks.0.0") for name in changed)
        assert not any(name.startswith("blocks.4") for name in changed)
        assert "without optimizer state" in found["no optimizer"]
        assert found == results[0][0]


class Harmful:
    """What a pickle must not be allowed to make."""


@on_rank
def lightning_state_with_a_class(layout, groups, path):
    chunk, _, _ = build_blocks(layout, 1)
    places = {"layout": layout, "groups": groups}
    save_checkpoint(path, TrainState([chunk]), {"x": Harmful()}, info={}, **places)
    options = {"load_optimizer": False, "strict": True, **places}
    with pytest.raises(CheckpointError, match=r"Harmful.*add_safe_globals"):
        load_checkpoint(path, TrainState([chunk]), **options)
    loaded = load_checkpoint(path, TrainState([chunk]), weights_only=False, **options)
    assert isinstance(loaded["x"], Harmful)


def test_a_pickle_is_refused_unless_trusted(tmp_path):
    run_ranks(lightning_state_with_a_class, 1, str(tmp_path / "last.ckpt"))


# ------------------------------------------------------------------------------ faults


@on_rank
def errors_of_loading(layout, groups, path):
    chunk, _, _ = build_blocks(layout, 1)
    with pytest.raises(CheckpointError) as caught:
        load_weights(path, [chunk], layout=layout, groups=groups)
    return str(caught.value)


def replace_by_a_file(path: Path) -> None:
    """What ``ckpt_path`` meets in the folder of a run under DDP."""
    shutil.rmtree(path)
    torch.save({"state_dict": {}}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "__0_0.distcp").unlink(), "`__0_0.distcp` is missing"),
        (lambda path: (path / ".metadata").unlink(), "`.metadata` is missing"),
        (lambda path: os.truncate(path / "__0_0.distcp", 100), "has 100 bytes instead of"),
        (lambda path: (path / "lightning_mcore.json").unlink(), "not a checkpoint of lightning"),
        (lambda path: (path / "lightning_mcore.json").write_text("{"), "not a checkpoint of"),
        (shutil.rmtree, "There is no checkpoint"),
        (replace_by_a_file, "MCoreStrategy(init_from=PATH) loads the weights"),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_error_on_all_ranks(own_copy, damage, message):
    damage(own_copy)
    first, second = run_ranks(errors_of_loading, 2, str(own_copy))
    assert message in first
    assert first == second


LOCAL_POINTS = (
    "preparing the directory",
    "finding the directory",
    "describing the model",
    "describing shards",
    "taking Lightning's state",
    "writing shards",
    "shards written",
    "noted what was written",
    "writing the manifest",
)
BACKGROUND_POINTS = ("snapshot taken", "writing in the background")
MAIN_POINTS = (
    "index written",
    "common.pt written",
    "lightning.pt written",
    "manifest written",
    "renaming",
)
COMMIT_POINTS = ("exchanged", "renamed")


def fail_at(point, rank, error):
    def hook(passed):
        if passed == point and dist.get_rank() == rank:
            raise error

    return hook


def failing_fsync(path):
    """Stands for a disk that is full while shards are written."""
    real = os.fsync

    def fsync(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    return fsync


@on_rank
def errors_of_saving(layout, groups, path):
    """Fails at every point on every rank in turn; the message, and what was left each time."""
    chunk, inner, wrapped = build_blocks(layout, 1)
    steps_on_blocks(chunk, inner, 1)
    places = {"layout": layout, "groups": groups}

    def save(step, background=False):
        info = {"global_step": step}
        options = {"info": info, "background": background, **places}
        start_save(path, TrainState([chunk], wrapped), {"step": step}, **options).commit()

    save(1)
    found = []
    points = [(p, False) for p in (*LOCAL_POINTS, *MAIN_POINTS, "disk")]
    points += [(p, True) for p in (BACKGROUND_POINTS[1], *LOCAL_POINTS, *MAIN_POINTS, "disk")]
    for point, background in points:
        for rank in range(layout.world_size if point not in MAIN_POINTS else 1):
            real = os.fsync
            if point == "disk":
                if layout.rank == rank:
                    os.fsync = failing_fsync(path)
            else:
                error = OSError(28, "No space left on device")
                checkpoint_files.fault_hook = fail_at(point, rank, error)
            with pytest.raises(CheckpointError) as caught:
                save(2, background)
            os.fsync = real
            checkpoint_files.fault_hook = None
            dist.barrier()
            beside = sorted(os.listdir(Path(path).parent))
            found.append((rank, str(caught.value), read_manifest(path)["global_step"], beside))
            dist.barrier()
    save(3)
    return found, read_manifest(path)["global_step"]


def test_a_failure_on_any_rank_is_the_same_error_on_all_and_keeps_the_old_one(tmp_path):
    path = tmp_path / "last.ckpt"
    (first, last), (second, _) = run_ranks(errors_of_saving, 2, str(path), sizes={"pp": 2})
    assert len(first) == 2 * (2 * len(LOCAL_POINTS) + len(MAIN_POINTS) + 2) + 2
    for (rank, message, step, beside), (_, other, _, _) in zip(first, second, strict=True):
        assert message == other
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in message
        assert step == 1
        assert beside == ["last.ckpt"]
    assert last == 3


@on_rank
def save_where_it_cannot(layout, groups, path):
    chunk, _, _ = build_blocks(layout, 1)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(path, TrainState([chunk]), {}, info={}, layout=layout, groups=groups)
    return str(caught.value)


def test_a_path_that_cannot_be_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    below_file, same = run_ranks(save_where_it_cannot, 2, str(tmp_path / "file" / "last.ckpt"))
    assert below_file == same
    assert "rank 0: FileExistsError" in below_file
    first, _ = run_ranks(save_where_it_cannot, 2, "s3://bucket/last.ckpt")
    assert "is a URL" in first


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system with room for a few files only."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(tiny_disk):
    (tiny_disk / "filling").write_bytes(bytes(12 * 1024))
    first, second = run_ranks(save_where_it_cannot, 2, str(tiny_disk / "last.ckpt"))
    assert first == second
    assert "No space left on device" in first
    assert [p.name for p in tiny_disk.iterdir()] == ["filling"]


@on_rank
def killed_in_a_save(layout, groups, path, point, victim, background):
    chunk, inner, wrapped = build_blocks(layout, 1)
    steps_on_blocks(chunk, inner, 1)

    def kill(passed=point):
        if passed == point and layout.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    if point == "shards":
        os.fsync = lambda descriptor: kill()
    checkpoint_files.fault_hook = kill
    state = TrainState([chunk], wrapped)
    places = {"layout": layout, "groups": groups}
    options = {"info": {"global_step": 2}, "background": background, **places}
    pending = start_save(path, state, {"step": 2}, **options)
    while not pending.settled():
        steps_on_blocks(chunk, inner, 1)
    pending.commit()


KILLS = [
    *((point, victim, False) for point in (*LOCAL_POINTS, "shards") for victim in (0, 1)),
    *((point, 0, False) for point in (*MAIN_POINTS, *COMMIT_POINTS)),
    *((point, victim, True) for point in (*BACKGROUND_POINTS, "shards") for victim in (0, 1)),
    *((point, 1, True) for point in ("shards written", "noted what was written")),
    *((point, 0, True) for point in ("index written", "renaming", *COMMIT_POINTS)),
]


@pytest.mark.parametrize(("point", "victim", "background"), KILLS)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    own_copy, tmp_path, point, victim, background
):
    path = own_copy
    places = {"sizes": {"pp": 2}, "timeout_s": 30}
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(killed_in_a_save, 2, str(path), point, victim, background, **places)
    complete = point in COMMIT_POINTS
    assert is_checkpoint(path)
    assert read_manifest(path).get("global_step") == (2 if complete else None)
    for leftover in set(tmp_path.iterdir()) - {path}:
        assert not is_checkpoint(leftover)
        with pytest.raises(CheckpointError, match="unfinished save"):
            read_manifest(leftover)


def test_remains_of_a_killed_save_are_removed_by_the_next(tmp_path):
    path = tmp_path / "last.ckpt"
    places = {"sizes": {"pp": 2}, "timeout_s": 30}
    with pytest.raises(RankError):
        run_ranks(killed_in_a_save, 2, str(path), "renaming", 0, False, **places)
    assert not path.exists()
    assert len(list(tmp_path.iterdir())) == 1
    saved = run_ranks(plain_blocks, 2, str(path), False, sizes={"pp": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]
    loaded = run_ranks(plain_blocks, 2, str(path), True, sizes={"pp": 2})
    assert all(torch.equal(saved[0][3][name], loaded[0][3][name]) for name in saved[0][3])


def test_a_save_killed_between_two_renames(tmp_path, monkeypatch):
    """Where the file system cannot exchange names, the old one waits beside and is put back."""
    monkeypatch.setattr(checkpoint_files, "_exchange_names", lambda one, other: False)
    target, aside = tmp_path / "last.ckpt", tmp_path / ".last.ckpt.0123abcd.tmp"
    for directory in (target, aside):
        directory.mkdir()
        (directory / "name").write_text(directory.name)

    def interrupt(point):
        if point == "old one aside":
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_files, "fault_hook", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_files.commit(aside, target)
    assert not target.exists()
    with pytest.raises(CheckpointError, match=r"predecessor.*\.old"):
        read_manifest(target)
    monkeypatch.setattr(checkpoint_files, "fault_hook", None)
    checkpoint_files.prepare(target, tmp_path / ".last.ckpt.4567abcd.tmp")
    assert (target / "name").read_text() == "last.ckpt"
    assert not aside.exists()
