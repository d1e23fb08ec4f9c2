"""Private names of Lightning that this package uses; each test fails when its name has moved."""

import inspect
import os
import sys

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities import distributed as fabric_distributed
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_mcore import MCoreStrategy, _launchers, _lightning


def test_subprocess_launcher():
    launcher = _launchers.subprocess_launcher(LightningEnvironment(), 2, 1, around=print)
    assert isinstance(launcher, _SubprocessScriptLauncher)
    assert (launcher.num_processes, launcher.num_nodes) == (2, 1)


@pytest.fixture
def started(monkeypatch):
    """Environments of the processes that the launcher starts, which are not started."""
    seen = []
    monkeypatch.setattr(
        subprocess_script.subprocess, "Popen", lambda command, env, cwd: seen.append(dict(env))
    )
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # what Lightning sets, to be undone
        monkeypatch.delenv(name)
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "UB_SKIPMC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return seen


WANTED = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "UB_SKIPMC": "1"}


def start_ranks():
    launcher = _launchers.subprocess_launcher(
        LightningEnvironment(), 3, 1, around=print, variables=lambda: WANTED
    )
    launcher._call_children_scripts()


def values(environ):
    return {name: environ.get(name) for name in WANTED}


def test_launched_ranks_get_the_variables(started):
    start_ranks()
    assert [values(environ) for environ in started] == [WANTED, WANTED]
    assert values(os.environ) == WANTED, "this process is rank zero"


def test_a_variable_of_the_users_own_wins(started, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    start_ranks()
    mine = {**WANTED, "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert [values(environ) for environ in started] == [mine, mine]
    assert values(os.environ) == mine


def test_what_cuda_would_not_read_any_more_is_not_pretended(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match="CUDA_DEVICE_MAX_CONNECTIONS=1 comes too late for rank"):
        start_ranks()
    assert [values(environ) for environ in started] == [WANTED, WANTED]
    assert values(os.environ) == {"CUDA_DEVICE_MAX_CONNECTIONS": None, "UB_SKIPMC": "1"}


def test_world_is_initialized():
    assert _lightning.world_is_initialized() is False


def test_init_world_calls_a_function_of_this_signature():
    parameters = inspect.signature(fabric_distributed._init_dist_connection).parameters
    assert list(parameters)[:2] == ["cluster_environment", "torch_distributed_backend"]
    kinds = {parameter.kind for parameter in parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD in kinds  # timeout= goes through to torch
    default = fabric_distributed._get_default_process_group_backend_for_device
    assert default(torch.device("cpu")) == "gloo"


def test_no_device_is_bound_to_the_world(monkeypatch):
    """It would open a communicator of all ranks for every group that the engine makes."""
    given = []
    monkeypatch.setattr(_lightning, "_init_dist_connection", lambda *_, **more: given.append(more))
    assert _lightning.init_world(None, torch.device("cuda", 0), "nccl", 60.0) == "nccl"
    assert [set(more) for more in given] == [{"timeout"}]


def test_set_rank_zero_reaches_lightnings_functions():
    before = rank_zero_only.rank
    try:
        _lightning.set_rank_zero(3)
        assert rank_zero_only.rank == fabric_rank_zero_only.rank == 3
        assert rank_zero_only(lambda: "called")() is None
    finally:
        _lightning.set_rank_zero(before)


class Module(L.LightningModule):
    def log(self, *args, **kwargs):
        raise AssertionError("the method is hidden during a step")


class TestCaptureLogs:
    def calls(self, run, module=None):
        seen = []
        module = module or L.LightningModule()
        with _lightning.capture_logs(module, lambda **kwargs: seen.append(kwargs)):
            run(module)
        return seen

    def test_arguments_arrive_by_name(self):
        seen = self.calls(lambda m: m.log("x", 1.0, True, None, False, True, "max"))
        assert seen == [
            {
                "name": "x",
                "value": 1.0,
                "prog_bar": True,
                "logger": None,
                "on_step": False,
                "on_epoch": True,
                "reduce_fx": "max",
            }
        ]

    def test_log_dict_arrives_entry_by_entry(self):
        seen = self.calls(lambda m: m.log_dict({"a": 1.0, "b": 2.0}, on_epoch=True, batch_size=3))
        assert [(s["name"], s["value"]) for s in seen] == [("a", 1.0), ("b", 2.0)]
        assert all(s["on_epoch"] is True and s["batch_size"] == 3 for s in seen)

    def test_a_misspelt_argument_is_a_type_error(self):
        with pytest.raises(TypeError, match="prog_baar"):
            self.calls(lambda m: m.log("x", 1.0, prog_baar=True))

    def test_the_method_is_back_afterwards(self):
        module, other = L.LightningModule(), L.LightningModule()
        method = module.log
        self.calls(lambda m: None, module)
        assert module.log == method
        assert "log" not in vars(module)
        assert "log" not in vars(other)
        assert L.LightningModule.log is type(module).log

    def test_the_method_is_back_after_an_error(self):
        module = L.LightningModule()
        with pytest.raises(KeyError):
            self.calls(lambda m: {}["missing"], module)
        assert "log" not in vars(module)

    def test_only_this_module_is_concerned(self):
        other = Module()
        with pytest.raises(AssertionError, match="hidden"):
            self.calls(lambda m: other.log("x", 1.0))


def test_run_closure_runs_the_closure_and_the_hooks_before_a_step():
    ran = []

    class Noting(Precision):
        def _after_closure(self, model, optimizer):
            ran.append(("after", model, optimizer))

    result = _lightning.run_closure(Noting(), "module", "optimizer", lambda: ran.append("closure"))
    assert result is None
    assert ran == ["closure", ("after", "module", "optimizer")]


def test_agreed_signals_replace_a_method_that_the_loop_calls():
    """Lightning has it from 2.6 on, where it is called before every batch."""
    if not hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor"):
        pytest.skip("this Lightning does not broadcast the flag")
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop)


def test_hold_step_schedulers_stops_only_those_by_step():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    by_step = LRSchedulerConfig(schedule, interval="step", frequency=2)
    by_epoch = LRSchedulerConfig(schedule, interval="epoch", frequency=3)
    release = _lightning.hold_step_schedulers([by_step, by_epoch])
    assert (by_step.frequency, by_epoch.frequency) == (sys.maxsize, 3)
    release()
    assert (by_step.frequency, by_epoch.frequency) == (2, 3)


def test_lightning_steps_schedulers_by_frequency():
    source = inspect.getsource(_TrainingEpochLoop._update_learning_rates)
    assert "% config.frequency == 0" in source


def test_register_strategies():
    for name in ("mcore", "mcore_cpu"):
        assert name in StrategyRegistry.available_strategies()
        assert isinstance(StrategyRegistry.get(name), MCoreStrategy)
    assert StrategyRegistry.get("mcore_cpu").process_group_backend == "gloo"


def test_checkpoints_that_wait(tmp_path):
    keep = ModelCheckpoint(tmp_path, save_last="link")
    assert {"_link_checkpoint", "file_exists"} <= set(dir(keep))
    parameters = inspect.signature(ModelCheckpoint._link_checkpoint).parameters
    assert list(parameters) == ["trainer", "filepath", "linkpath"]
    trainer = L.Trainer(accelerator="cpu", devices=1, callbacks=[keep], logger=False)
    (tmp_path / "new.ckpt").mkdir()
    queued = []
    with _lightning.checkpoints_that_wait(trainer, queued.append, lambda path: path == "pending"):
        keep._link_checkpoint(trainer, str(tmp_path / "new.ckpt"), str(tmp_path / "last.ckpt"))
        assert not (tmp_path / "last.ckpt").exists()
        queued[0]()
        assert (tmp_path / "last.ckpt").resolve() == tmp_path / "new.ckpt"
        assert keep.file_exists("pending", trainer)
        assert not keep.file_exists("other", trainer)
    assert not {"_link_checkpoint", "file_exists"} & set(vars(keep))


def test_wrapped_sampler():
    class Sampler(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(range(4))

        def __len__(self):
            return 4

    own = Sampler()
    wrapper = fabric_distributed.DistributedSamplerWrapper(own, num_replicas=2, rank=0)
    assert _lightning.wrapped_sampler(wrapper) is own
    assert _lightning.wrapped_sampler(own) is None


def test_around_a_trainers_entry_points():
    """Both launchers run the function inside what they were given, whoever starts processes."""
    called = []

    def around(function, *args, **kwargs):
        called.append(args)
        return function(*args, **kwargs)

    launcher = _launchers.present_launcher(around)
    assert launcher.launch(lambda value: value + 1, 2, trainer=None) == 3
    assert launcher.kill(15) is None
    assert not _launchers.has_children(launcher)
    single = _launchers.subprocess_launcher(LightningEnvironment(), 1, 1, around=around)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(single), "_call_children_scripts", lambda self: None)
        assert single.launch(lambda value: value + 1, 3, trainer=None) == 4
    assert called == [(2,), (3,)]
    assert callable(getattr(call, _lightning.ENTRY_POINT))
    assert "launcher.launch(" in inspect.getsource(getattr(call, _lightning.ENTRY_POINT))


def test_handlers_of_signals_that_are_replaced(tmp_path):
    for name in (
        "_sigterm_notifier_fn",
        "_slurm_sigusr_handler_fn",
        "_register_signal",
    ):
        assert callable(getattr(_SignalConnector, name)), name
    trainer = L.Trainer(
        logger=False, accelerator="cpu", devices=1, default_root_dir=tmp_path, barebones=True
    )
    assert trainer._signal_connector._original_handlers == {}
    assert _lightning.preemption_path(trainer) == str(tmp_path / "hpc_ckpt_1.ckpt")


def test_slurm_is_asked_to_requeue(monkeypatch, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    _lightning.requeue_slurm_job()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    _lightning.requeue_slurm_job()
    assert (tmp_path / "calls").read_text() == "requeue 5\nrequeue 7_2\n"
