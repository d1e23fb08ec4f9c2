"""Attribution of what real traces hold.

``traces/`` has device events of three traces of two H200s (torch 2.11, megatron-core 0.19.2), with
the host's records of NCCL calls for the first, and two of gloo on CPU (torch 2.13 and 2.11). All
else, and every argument that is not read, was cut away.
"""

import collections
import gzip
import json
import re
from pathlib import Path

import pytest

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.timeline import GroupNames, analyse, read_trace, timeline_of
from lightning_mcore.timeline.names import group_of_description, kernel_rule

TRACES = Path(__file__).parent / "traces"


def load(name, **given):
    return timeline_of(read_trace(TRACES / f"{name}.json.gz"), GroupNames(given))


def communication(line):
    """Operations by group and collective: count, and time of all of them in us."""
    found = collections.defaultdict(lambda: [0, 0.0])
    for item in line.intervals:
        if item.kind == "communication":
            entry = found[item.group, item.collective]
            entry[0] += 1
            entry[1] += item.end_us - item.start_us
    return {key: (count, round(time)) for key, (count, time) in found.items()}


# What of a raw trace is communication, written down once more and independently of the package.
IS_COMMUNICATION = re.compile(r"nccl|userbuffers_|deep_ep::intranode::|Memcpy PtoP")


def grid_reading(name, cells=200_000):
    """Compute, exposed and idle time from the raw JSON, by marking cells of a fine grid."""
    raw = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    events = [e for e in raw["traceEvents"] if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    start = min(e["ts"] for e in events)
    width = (max(e["ts"] + e["dur"] for e in events) - start) / cells
    compute, comm = bytearray(cells), bytearray(cells)
    for event in events:
        first = round((event["ts"] - start) / width)
        last = round((event["ts"] + event["dur"] - start) / width)
        row = comm if IS_COMMUNICATION.search(event["name"]) else compute
        row[first:last] = b"\1" * (last - first)
    exposed = sum(1 for a, b in zip(compute, comm, strict=True) if b and not a)
    return {
        "compute": sum(compute) * width,
        "exposed": exposed * width,
        "idle": (cells - sum(compute) - exposed) * width,
    }


@pytest.mark.parametrize("name", ["nccl_h200", "userbuffers_h200", "deepep_h200"])
def test_figures_agree_with_an_independent_reading(name):
    times, other = analyse(load(name)), grid_reading(name)
    assert times.compute_us == pytest.approx(other["compute"], rel=0.01)
    assert times.exposed_us == pytest.approx(other["exposed"], rel=0.01)
    assert times.idle_us == pytest.approx(other["idle"], rel=0.01)


# get_temporal_breakdown (us) and get_comm_comp_overlap (%) of HolisticTraceAnalysis 0.5.0 on the
# same files. It knows NCCL alone, so the others can only be compared in when nothing runs.
HTA = {
    "nccl_h200": {"idle": 7013, "compute": 3117, "overlap": 26.37},
    "userbuffers_h200": {"idle": 3945},
    "deepep_h200": {"idle": 53142},
}


def check_against_hta(name, idle, compute=None, overlap=None):
    line = load(name)
    times = analyse(line)
    # HTA cuts start and duration to whole us: each interval may lose up to 1 us at its end.
    assert 0 <= idle - times.idle_us <= len(line.intervals)
    if compute is None:
        return
    # It counts copies as a third kind, which does not cover communication.
    kernels = [item for item in line.intervals if item.kind != "copy"]
    only = analyse(type(line)(0, 2, tuple(kernels), ()), device=0)
    assert 0 <= only.compute_us - compute <= len(kernels)
    assert 100 * only.overlap == pytest.approx(overlap, abs=0.5)


@pytest.mark.parametrize("name", HTA)
def test_figures_agree_with_those_that_hta_gave(name):
    check_against_hta(name, **HTA[name])


@pytest.mark.parametrize("name", HTA)
def test_figures_agree_with_hta(name):
    """Where it is installed; it is no development dependency, because it brings Jupyter."""
    hta = pytest.importorskip("hta.trace_analysis")
    analysis = hta.TraceAnalysis(trace_files={0: str(TRACES / f"{name}.json.gz")})
    row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    if name != "nccl_h200":
        check_against_hta(name, row["idle_time(us)"])
        return
    overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]
    check_against_hta(name, row["idle_time(us)"], row["compute_time(us)"], overlap)


def test_nccl_kernels_are_attributed_by_the_profilers_record():
    line = load("nccl_h200", **{"1": "tp"})
    assert communication(line) == {
        ("tp", "all_gather"): (1, 999),
        ("world", "all_reduce"): (5, 1648),
        # Carries no record of its own; the two calls before its launch do.
        ("world", "send_recv"): (1, 6),
    }
    gathered, *reduced, sent = [i for i in line.intervals if i.kind == "communication"]
    assert (gathered.size, gathered.group_size) == (16777216 * 4, 2)
    assert [item.size for item in reduced] == [4 * n for n in (4196352, *[8392704] * 3, 4196352)]
    assert (sent.size, sent.group_size) == (1024 * 4, 2)
    part = analyse(line).groups["tp"]
    assert part.busbw_gbps == pytest.approx(16777216 * 4 / 2 / 999.042e-6 / 1e9)


def test_a_group_is_other_unless_it_is_named():
    assert ("other", "all_gather") in communication(load("nccl_h200"))


def test_sends_over_the_world_are_the_pipelines_where_there_is_one():
    trace = read_trace(TRACES / "nccl_h200.json.gz")
    trace["distributedInfo"]["pg_config"][1]["pg_desc"] = "PIPELINE_MODEL_PARALLEL_GROUP"
    assert ("pp", "send_recv") in communication(timeline_of(trace))
    trace["distributedInfo"]["pg_config"][1]["pg_desc"] = "CONTEXT_PARALLEL_GROUP"
    assert ("cp", "send_recv") in communication(timeline_of(trace))
    # Also where the host's part of the trace is missing.
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["cat"] == "kernel"]
    assert ("cp", "send_recv") in communication(timeline_of(trace))


def test_userbuffers_and_their_copies_are_tensor_parallel():
    line = load("userbuffers_h200")
    assert communication(line) == {
        ("tp", "copy"): (16, 1422),
        ("tp", "all_gather"): (8, 1643),
        ("tp", "reduce_scatter"): (40, 4280),
        ("tp", None): (32, 2527),
    }
    times = analyse(line)
    assert times.groups.keys() == {"tp"}
    # 4 layers at about 17 ms: this trace overlaps well, and says by how much.
    assert times.groups["tp"].overlap == pytest.approx(0.777, abs=0.005)
    assert times.groups["tp"].algbw_gbps == pytest.approx(377.5, abs=1), "of the copy engines"


def test_deepep_is_expert_parallel_and_its_layout_kernel_computes():
    line = load("deepep_h200")
    assert communication(line) == {("ep", None): (16, 5289)}
    layout = [item for item in line.intervals if "deep_ep::layout" in item.name]
    assert {item.kind for item in layout} == {"compute"}
    assert len(layout) == 2


@pytest.mark.parametrize("name", ["gloo_torch213", "gloo_torch211"])
def test_gloo_ranges_find_the_calls_that_began_them(name):
    counts = {
        key: count for key, (count, _) in communication(load(name)).items() if key[1] is not None
    }
    assert counts == {
        ("other", "all_reduce"): 2,
        # Twice as a list of tensors and as one: both are gloo:all_gather.
        ("other", "all_gather"): 2,
        # On gloo an all-reduce does the work of a reduce-scatter.
        ("other", "reduce_scatter"): 1,
        ("other", "broadcast"): 1,
        ("other", "all_to_all"): 1,
        ("other", "send_recv"): 4,
    }
    line = load(name)
    sizes = [item.size for item in line.intervals if item.collective == "all_reduce"]
    assert sizes == [4000, 4_000_000]


@pytest.mark.parametrize("name", ["gloo_torch213", "gloo_torch211"])
def test_waits_on_gloo_are_exposed(name):
    """This rank waited 50 ms for an all-reduce, 29 for a receive and 20 for a batch of both."""
    line = load(name)
    times = analyse(line)
    waited = [i for i in line.intervals if i.kind == "communication" and i.size in (4000, 40, 28)]
    alone = analyse(
        type(line)(0, 2, tuple(i for i in line.intervals if i in waited), line.marks), device=-1
    )
    # The others slept that long; a busy machine wakes threads some ms late.
    assert 98_000 < alone.exposed_us < 106_000
    assert times.exposed_us >= 0.99 * alone.exposed_us
    assert times.compute_us + times.exposed_us + times.idle_us == pytest.approx(times.step_us)


@pytest.mark.parametrize(
    ("name", "group", "collective"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", None, "ar"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(...)", None, "rs"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", None, "p2p"),
        ("void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<2>(int, int)", "tp", "rs"),
        ("void userbuffers_fp16_sum_inplace_gpu_rw_ag<2>(int, int)", "tp", "ag"),
        ("userbuffers_fp16_sum_inplace_gpu_mc_rs_oop_fp8<8, __nv_fp8_e4m3>", "tp", "rs"),
        ("kuserbuffers_pushsendrecv(int*, int*)", "tp", None),
        ("void deep_ep::internode::dispatch<false, 4, false>(int4*)", "ep", None),
        ("void deep_ep::internode_ll::combine<true>(void*)", "ep", None),
    ],
)
def test_kernel_names(name, group, collective):
    short = {"ar": "all_reduce", "rs": "reduce_scatter", "ag": "all_gather", "p2p": "send_recv"}
    rule = kernel_rule(name)
    assert (rule.group, rule.collective) == (group, short.get(collective))


@pytest.mark.parametrize(
    "name",
    [
        "nvjet_sm90_tst_256x128_64x4_1x4_h_bz_coopA_NNT",
        "void at::native::reduce_kernel<128, 4>",
        "void deep_ep::layout::get_dispatch_layout<256, 4, 8>(long const*)",
        "triton_red_fused_add_mean_0",
    ],
)
def test_compute_kernels(name):
    assert kernel_rule(name) is None


@pytest.mark.parametrize(
    ("description", "group"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("DATA_PARALLEL_GROUP_WITH_CP_AG", "dp"),
        ("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "dp"),
        ("EXPERT_DATA_PARALLEL_GROUP", "dp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "mp"),
        ("EXPERT_TENSOR_PARALLEL_GROUP", "tp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1", "cp"),
        ("EMBEDDING_GROUP", "embedding"),
        ("POSITION_EMBEDDING_GROUP", "embedding"),
        ("MODEL_PARALLEL_GROUP", "mp"),
        ("GTP_WEIGHT_REMAT_GROUP", "tp"),
        ("default_pg", "world"),
        ("undefined", None),
    ],
)
def test_descriptions_of_the_engines_groups(description, group):
    assert group_of_description(description) == group


def test_every_group_that_the_engine_describes_is_known():
    """Descriptions are literals in its source: a new one must not fall under ``other``."""
    from megatron.core import parallel_state

    source = Path(parallel_state.__file__).read_text()
    found = set(re.findall(r"group_desc=f?[\"']([^\"'{]+)", source))
    assert len(found) > 15
    ours = {"HIERARCHICAL_": "CONTEXT_PARALLEL_GROUP", "HYBRID_DP_CP_GROUP_": "2"}
    unknown = [d for d in found if group_of_description(d + ours.get(d, "")) is None]
    assert not unknown


def test_files_that_are_no_traces_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="is not there"):
        read_trace(tmp_path / "missing.json")
    for content in (b"not json", b"\x1f\x8bcut off", b"[1, 2]", b'{"a": 1}'):
        path = tmp_path / "bad.json"
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match="profiler"):
            read_trace(path)
