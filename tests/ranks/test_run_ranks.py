"""What run_ranks promises: order, output, failures, time limits, and that nothing stays behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_mcore import testing
from lightning_mcore.errors import ConfigurationError, MCoreError
from lightning_mcore.testing import RankError, RankTimeout, run_ranks

LAUNCHER = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
)


def environment(*names):
    return {name: os.environ.get(name) for name in names}


def rank_of_this():
    return int(os.environ["RANK"])


def return_late_if_first(label, *, delay_s):
    if rank_of_this() == 0:
        time.sleep(delay_s)
    return rank_of_this(), label


def sum_over_ranks():
    dist.init_process_group("gloo")
    value = torch.tensor([rank_of_this() + 1.0])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value


def big_output(size):
    print("x" * size)
    return torch.full((size,), float(rank_of_this()))


def leave_the_other_waiting(failing_rank):
    dist.init_process_group("gloo")
    print(f"about to meet, rank {rank_of_this()}")
    if rank_of_this() == failing_rank:
        raise ZeroDivisionError("the cause")
    dist.barrier()


def fail_in_order():
    time.sleep(0.3 * (2 - rank_of_this()))
    raise ValueError(f"from rank {rank_of_this()}")


def die(number):
    dist.init_process_group("gloo")
    if rank_of_this() == 1:
        print("last words")
        os.kill(os.getpid(), number)
    dist.barrier()


def exit_quietly():
    os._exit(0)


def exit_after_return():
    threading.Thread(target=time.sleep, args=(60,)).start()
    return "returned"


def raise_system_exit():
    sys.exit("no way")


def the_line_that_hangs():
    time.sleep(60)


def hang_on_rank_1():
    print("started")
    if rank_of_this() == 1:
        the_line_that_hangs()


def ignore_signals_and_hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("pids", os.getpid(), child.pid, flush=True)
    time.sleep(60)


def talk():
    print(f"one {rank_of_this()}\ntwo")
    print("three", file=sys.stderr)
    os.write(1, b"50%\r100%\nno newline at the end")


def change_environment():
    before = os.environ.get("OF_A_RANK")
    os.environ["OF_A_RANK"] = "1"
    os.environ.pop("OF_THE_CALLER", None)
    return before


def return_a_lambda():
    return lambda: None


def loaded_modules():
    return {
        name: name in sys.modules for name in ("megatron.core.models.gpt", "lightning.pytorch")
    }, len(os.listdir("/proc/self/task"))


def fit_with_lightning():
    import lightning as L
    from lightning.fabric.plugins.environments import LightningEnvironment

    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=1,
    )
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer.fit(BoringModel())
    environment = trainer.strategy.cluster_environment
    assert isinstance(environment, LightningEnvironment)
    assert environment.creates_processes_externally
    return trainer.global_rank, trainer.world_size, trainer.global_step


# ---------------------------------------------------------------------------- results


def test_results_are_in_the_order_of_ranks():
    assert run_ranks(return_late_if_first, 3, "a", delay_s=0.3) == [(r, "a") for r in range(3)]


def test_ranks_talk_to_each_other():
    assert [float(v) for v in run_ranks(sum_over_ranks, 2)] == [3.0, 3.0]


def test_much_output_and_big_results_do_not_deadlock(capsys):
    size = 3_000_000
    first, second = run_ranks(big_output, 2, size)
    assert first.shape == second.shape == (size,)
    assert float(second.sum()) == size
    assert len(capsys.readouterr().out) > 2 * size


def test_a_trainer_takes_ranks_as_started_from_outside():
    assert run_ranks(fit_with_lightning, 2) == [(0, 2, 1), (1, 2, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_other_ways_to_start(method):
    assert [float(v) for v in run_ranks(sum_over_ranks, 2, start_method=method)] == [3.0, 3.0]


def how_gpus_are_looked_for():
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    server = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    return f"{name}=1".encode() in server


def test_the_server_leaves_cuda_to_the_ranks():
    """A process that has asked CUDA for GPUs cannot fork others that use them."""
    assert run_ranks(how_gpus_are_looked_for, 2) == [True, True]


# ---------------------------------------------------------------------------- environment


def test_ranks_find_what_a_launcher_sets():
    (first, second) = run_ranks(environment, 2, *LAUNCHER)
    port = first.pop("MASTER_PORT")
    assert second.pop("MASTER_PORT") == port
    assert int(port) > 1023
    common = {
        "WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    assert first == {**common, "RANK": "0", "LOCAL_RANK": "0"}
    assert second == {**common, "RANK": "1", "LOCAL_RANK": "1"}


def test_env_adds_and_removes(monkeypatch):
    monkeypatch.setenv("OF_THE_CALLER", "1")
    monkeypatch.setenv("SLURM_NTASKS", "64")
    names = ("OF_THE_CALLER", "NEW", "SLURM_NTASKS")
    assert run_ranks(environment, 1, *names) == [
        {"OF_THE_CALLER": "1", "NEW": None, "SLURM_NTASKS": None}
    ]
    assert run_ranks(environment, 1, *names, env={"OF_THE_CALLER": None, "NEW": "2"}) == [
        {"OF_THE_CALLER": None, "NEW": "2", "SLURM_NTASKS": None}
    ]


def test_what_ranks_change_stays_in_them(monkeypatch):
    monkeypatch.setenv("OF_THE_CALLER", "1")
    before = dict(os.environ)
    assert run_ranks(change_environment, 2) == [None, None]
    assert run_ranks(change_environment, 2) == [None, None]
    assert dict(os.environ) == before


def test_ranks_find_heavy_modules_imported_and_run_one_thread():
    assert run_ranks(loaded_modules, 1) == [
        ({"megatron.core.models.gpt": True, "lightning.pytorch": True}, 1)
    ]


# ---------------------------------------------------------------------------- output


def test_each_line_says_whose_it_is(capsys):
    run_ranks(talk, 2)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        said = [f"one {rank}", "two", "three", "100%", "no newline at the end"]
        assert own == [f"[rank {rank}] {text}" for text in said]
    assert len(lines) == 10


# ---------------------------------------------------------------------------- failures


@pytest.mark.parametrize("failing", [0, 1])
def test_the_cause_is_shown_and_not_its_consequences(failing):
    with pytest.raises(RankError) as caught:
        run_ranks(leave_the_other_waiting, 2, failing)
    text = str(caught.value)
    assert caught.value.rank == failing
    assert text.startswith(f"rank {failing} of 2 failed first, after ")
    assert "ZeroDivisionError: the cause" in text.split("\n\n")[1]
    assert "leave_the_other_waiting" in text
    assert "_rank_main" not in text
    assert f"last output of rank {1 - failing}:\n[rank {1 - failing}] about to meet" in text


def test_the_first_failure_by_time_is_chosen():
    with pytest.raises(RankError, match="rank 2 of 3 failed first") as caught:
        run_ranks(fail_in_order, 3)
    text = str(caught.value)
    assert caught.value.rank == 2
    assert text.index("from rank 2") < text.index("rank 1 failed later: ValueError: from rank 1")


def test_others_do_not_keep_a_failure_waiting():
    start_s = time.monotonic()
    with pytest.raises(RankError):
        run_ranks(leave_the_other_waiting, 2, 1, timeout_s=60)
    assert time.monotonic() - start_s < 15


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_is_killed_is_the_cause(number):
    with pytest.raises(RankError, match=f"killed by {number.name}") as caught:
        run_ranks(die, 2, int(number))
    assert caught.value.rank == 1
    assert "[rank 1] last words" in str(caught.value)
    if number == signal.SIGSEGV:
        assert "[rank 1] Fatal Python error: Segmentation fault" in str(caught.value)


def test_a_rank_that_exits_quietly_has_failed():
    with pytest.raises(RankError, match="exit code 0"):
        run_ranks(exit_quietly, 1)


def test_sys_exit_is_a_failure():
    with pytest.raises(RankError, match="SystemExit: no way"):
        run_ranks(raise_system_exit, 1)


def test_a_result_without_pickle_is_a_failure():
    with pytest.raises(RankError, match="return_a_lambda"):
        run_ranks(return_a_lambda, 1)


def test_errors_belong_to_the_package():
    assert issubclass(RankError, MCoreError)
    assert issubclass(RankTimeout, (MCoreError, TimeoutError))


def test_what_cannot_be_sent_is_refused_at_once():
    with pytest.raises(ConfigurationError, match="at the level of a module"):
        run_ranks(lambda: None, 1)
    with pytest.raises(ConfigurationError, match=r"`world_size` \(0\)"):
        run_ranks(rank_of_this, 0)


# ---------------------------------------------------------------------------- time


def test_time_is_up_names_ranks_and_places():
    run_ranks(rank_of_this, 1)  # the server is there
    start_s = time.monotonic()
    with pytest.raises(RankTimeout) as caught:
        run_ranks(hang_on_rank_1, 2, timeout_s=4)
    assert time.monotonic() - start_s < 6
    text = str(caught.value)
    assert caught.value.ranks == [1]
    assert text.startswith("ranks [1] of 2 had not finished after 4 s.")
    assert "in the_line_that_hangs" in text
    assert "in hang_on_rank_1" in text
    assert "[rank 0] started" in text


class Hesitant:
    """In place of a rank: its stack comes in two parts."""

    def __init__(self):
        self.stack = b""
        self.end, self.pipe = os.pipe()

    def write(self):
        os.write(self.pipe, b"Current thread\n")
        time.sleep(0.3)
        os.write(self.pipe, b'  File "x.py", line 1 in hangs\n')

    def open_ends(self):
        return [self.end]

    def receive(self, ready):
        if self.end in ready:
            self.stack += os.read(self.end, 4096)


def test_a_stack_is_read_to_its_end():
    rank = Hesitant()
    threading.Thread(target=rank.write).start()
    testing._receive_stacks([rank], [rank])
    assert rank.stack.splitlines() == [b"Current thread", b'  File "x.py", line 1 in hangs']


def test_a_collective_that_waits_for_ever_is_located():
    with pytest.raises(RankTimeout) as caught:
        run_ranks(wait_for_nobody, 2, timeout_s=4)
    assert caught.value.ranks == [0, 1]
    assert "in barrier" in str(caught.value)


def wait_for_nobody():
    dist.init_process_group("gloo")
    if rank_of_this() == 0:
        time.sleep(60)
    dist.barrier()


def test_a_rank_that_returned_but_does_not_end_is_told_apart():
    with pytest.raises(RankTimeout, match="rank 0 had returned, but not ended"):
        run_ranks(exit_after_return, 1, timeout_s=4)


def test_ranks_are_killed_with_what_they_started(capsys):
    with pytest.raises(RankTimeout):
        run_ranks(ignore_signals_and_hang, 2, timeout_s=4)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if " pids " in line]
    pids = [int(number) for line in lines for number in line[-2:]]
    assert len(pids) == 4
    deadline_s = time.monotonic() + 5
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "processes were left behind"
        time.sleep(0.02)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---------------------------------------------------------------------------- nothing stays behind


def ranks_alive():
    return [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    ]


def test_many_calls_leave_nothing_behind():
    ports = set()
    run_ranks(rank_of_this, 2)
    descriptors, processes = os.listdir("/proc/self/fd"), ranks_alive()
    start_s = time.monotonic()
    for _ in range(20):
        first, _ = run_ranks(environment, 2, "MASTER_PORT")
        ports.add(int(first["MASTER_PORT"]))
    print(f"{(time.monotonic() - start_s) / 20:.3f} s per call")
    assert ranks_alive() == processes, "only the server stays"
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    for port in ports:
        with socket.socket() as listener:
            # Refused only where something listens: connections in their last state do not count.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))


SCRIPT = """
import os
from lightning_mcore.testing import run_ranks

def place():
    return os.environ["RANK"], __name__

if __name__ == "__main__":
    print(run_ranks(place, 2))
"""


@pytest.mark.slow
def test_a_script_may_use_its_own_functions(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([("0", "__mp_main__"), ("1", "__mp_main__")])
