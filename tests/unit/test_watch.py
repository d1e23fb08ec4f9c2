"""The words of failure messages, what counts as a failed collective, and the hub's judgement."""

import fcntl
import json
import resource
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_mcore.watch.hub import Connection, Hub
from lightning_mcore.watch.monitor import _has_news, is_communication_error
from lightning_mcore.watch.progress import Progress
from lightning_mcore.watch.records import Failure, hang_report
from lightning_mcore.watch.stacks import is_inside, stack_of, unfinished_on_device


def test_a_status_says_where_and_the_newest_checkpoint_that_is_left(tmp_path):
    progress = Progress(step=7)
    assert progress.resume_hint() == "Last step completed: 7. No checkpoint had been completed."
    progress.enter("training_step", 3)
    kept = tmp_path / "kept.ckpt"
    kept.mkdir()
    progress.checkpoints += [str(kept), str(tmp_path / "deleted.ckpt")]
    assert progress.resume_hint().endswith(f"Resume with ckpt_path={str(kept)!r}.")
    failure = Failure("died", 2, "stage 1, tp 0, dp 0", progress.status())
    assert failure.message() == (
        "Rank 2 (stage 1, tp 0, dp 0) died without an exception (killed, out of memory, or a crash"
        " in native code). Last heard of in step 8, training_step, microbatch 3."
    )


def test_what_the_device_has_not_finished_is_in_the_report(monkeypatch):
    """NCCL's recorder answers here in the form that PyTorch documents; it needs a GPU to fill."""
    entry = {
        "profiling_name": "nccl:all_reduce",
        "collective_seq_id": 41,
        "process_group": ["3", "TENSOR_MODEL_PARALLEL_GROUP"],
        "state": "started",
    }
    asked = {}

    def dump(**options):
        asked.update(options)
        return json.dumps({"entries": [entry] * 20}).encode()

    bindings = torch._C._distributed_c10d
    monkeypatch.setattr(bindings, "_dump_nccl_trace_json", dump, raising=False)
    found = unfinished_on_device(most=1)
    assert asked == {"includeCollectives": True, "onlyActive": True}
    assert found == ["nccl:all_reduce 41 of ['3', 'TENSOR_MODEL_PARALLEL_GROUP'] (started)"]
    report = {"where": "stage 0", "status": {}, "wait": None, "stack": "", "on_device": found}
    assert f"unfinished on the device: {found[0]}." in hang_report({0: report}, silent=[])
    monkeypatch.delattr(bindings, "_dump_nccl_trace_json")
    assert unfinished_on_device() == []


def test_a_rank_listens_on_a_descriptor_of_any_number():
    """``select.select`` refuses those above 1023, which a job with many groups reaches."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1100:
        pytest.skip("the limit on open files is too low for such a descriptor")
    mine, theirs = socket.socketpair()
    with mine, theirs, socket.socket(fileno=fcntl.fcntl(mine, fcntl.F_DUPFD, 1100)) as high:
        assert not _has_news(high, 0.0)
        theirs.send(b"x")
        assert _has_news(high, 1.0)
        assert high.recv(1) == b"x"
        theirs.close()
        assert _has_news(high, 1.0)


def test_a_phase_is_left_where_an_error_came_from():
    progress = Progress()
    with progress.during("saving"):
        assert progress.phase == "saving"
    assert progress.phase == "the start of the run"
    with pytest.raises(KeyError), progress.during("saving"):
        raise KeyError
    assert progress.phase == "saving"


def test_a_hang_report_names_for_whom_each_rank_waits():
    wait = {"op": "all_reduce", "group": "dp", "ranks": [0, 1]}
    reports = {
        0: {"where": "a", "status": {"step": 1, "phase": "p"}, "wait": wait, "stack": "here"},
        1: {"where": "b", "status": {"step": 1, "phase": "q"}, "wait": None, "stack": "there"},
        2: {"where": "c", "status": {"step": 1, "phase": "p"}, "wait": None, "stack": "here"},
    }
    text = hang_report(reports, silent=[3])
    assert "Rank 3 did not answer." in text
    assert (
        "Rank 0 (a): step 2, p; waits in all_reduce over dp (ranks [0, 1]) for ranks [1]." in text
    )
    assert "Rank 1 (b): step 2, q; in no collective that is known here." in text
    assert "Stack of rank(s) [0, 2]" in text
    reports[1]["wait"] = wait
    assert "over dp (ranks [0, 1]), like all its members." in hang_report(reports, silent=[])


def test_which_errors_are_the_consequence_of_another_rank():
    assert is_communication_error(RuntimeError("gloo/transport/tcp/pair.cc: Connection closed"))
    assert is_communication_error(dist.DistNetworkError("x"))
    assert not is_communication_error(RuntimeError("shapes do not match"))
    assert not is_communication_error(KeyError("gloo"))
    own = KeyError("own")
    own.__cause__ = RuntimeError("NCCL communicator was aborted")
    assert is_communication_error(own)


def test_a_stack_of_another_thread():
    started, end = threading.Event(), threading.Event()

    def waits_here():
        started.set()
        end.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    started.wait()
    assert "waits_here" in stack_of(thread.ident)
    assert is_inside(thread.ident, "waits_here")
    assert not is_inside(thread.ident, "elsewhere")
    end.set()
    thread.join()
    assert "ended" in stack_of(thread.ident)


@pytest.fixture
def hub():
    hub = Hub("127.0.0.1", "secret", 2.0, lambda: {"step": 0})
    hub.start()
    yield hub
    hub.close()
    assert not hub.is_alive()


def join(hub, rank, token="secret"):
    import socket

    connection = Connection(socket.create_connection(("127.0.0.1", hub.port)))
    connection.send(t="hello", token=token, rank=rank, where=f"place {rank}")
    return connection


def verdict(connection, within_s=4.0):
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        messages = connection.receive()
        if messages is None:
            return None
        for message in messages:
            if message["t"] == "failed":
                return message["failure"]
    return "nothing"


def failed(connection, kind, rank):
    failure = Failure(kind, rank, f"place {rank}", {}, "text")
    connection.send(t="fail", failure=failure.as_dict())


def test_the_cause_is_told_rather_than_the_collective_that_failed_first(hub):
    one, two, three = (join(hub, rank) for rank in (1, 2, 3))
    failed(one, "communication", 1)
    time.sleep(0.5)
    failed(two, "raised", 2)
    for each in (one, two, three):
        told = verdict(each)
        assert (told["kind"], told["rank"]) == ("raised", 2)


def test_a_closed_connection_is_a_death_and_a_farewell_is_none(hub):
    one, two, three = (join(hub, rank) for rank in (1, 2, 3))
    time.sleep(0.3)
    two.send(t="bye")
    two.sock.close()
    assert verdict(one, 1.0) == "nothing"
    three.sock.close()
    told = verdict(one)
    assert (told["kind"], told["rank"], told["where"]) == ("died", 3, "place 3")


def test_silence_is_noticed(hub):
    one, two = join(hub, 1), join(hub, 2)
    for _ in range(9):
        one.send(t="beat", status={"step": 4})
        time.sleep(0.3)
    told = verdict(one)
    assert (told["kind"], told["rank"]) == ("lost", 2)
    assert two.receive() is not None


def test_a_stranger_is_turned_away(hub):
    stranger = join(hub, 1, token="guess")
    member = join(hub, 2)
    stranger.send(t="fail", failure=Failure("raised", 1, "", {}).as_dict())
    assert verdict(stranger, 1.0) is None
    garbage = join(hub, 3)
    time.sleep(0.5)
    garbage.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    told = verdict(member, 2.0)
    assert told["kind"] == "died", "garbage on a member's connection ends it"
