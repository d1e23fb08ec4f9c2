"""What userbuffers are told, and what TransformerEngine makes of it."""

import ast
import importlib.util
import os
import types
import typing
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch

from lightning_mcore import MCoreStrategy
from lightning_mcore._mcore.userbuffers import check_model
from lightning_mcore.config import ModelDims, ParallelSizes, SwitchRequest
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import resolve_layout
from lightning_mcore.switches import Facts, plan_switches
from lightning_mcore.topology import Topology
from lightning_mcore.userbuffers import _ALLOWED, GemmOverlap, TPCommOverlap
from lightning_mcore.userbuffers_plan import (
    check_quantization,
    plan_userbuffers,
    userbuffers_environment,
    userbuffers_fields,
)

GOOD: dict[str, Any] = {
    "tp": 2,
    "cp": 1,
    "sequence_parallel": True,
    "precision": "bf16-mixed",
    "on_gpu": True,
    "te_version": (2, 20, 2),
    "gpus_per_nvlink_domain": 8,
    "seq_length": 4096,
    "hidden_size": 8192,
    "micro_batch_size": 2,
}
RING = {"method": "ring_exchange"}
PIPELINE = {"method": "pipeline"}
BOTH_DGRADS = {"qkv_dgrad": RING, "fc1_dgrad": PIPELINE}


def plan(asked: TPCommOverlap | None = None, **changes: Any) -> Any:
    return plan_userbuffers(asked or TPCommOverlap(), **{**GOOD, **changes})


class TestEntries:
    def test_a_ring_has_its_own_defaults(self):
        """Not the pipeline's cluster size, which TransformerEngine would keep."""
        table = plan(TPCommOverlap(gemms={"proj_fprop": RING})).ub_cfgs[0]
        assert table == {
            "proj_fprop": {
                "method": "ring_exchange",
                "num_sm": 1,
                "cga_size": 1,
                "set_sm_margin": False,
                "num_splits": 2,
                "aggregate": False,
                "use_ce": True,
            }
        }

    def test_a_pipeline_has_four_splits(self):
        asked = TPCommOverlap(gemms={"fc2_fprop": GemmOverlap(method="pipeline", num_sm=24)})
        assert plan(asked).ub_cfgs[0]["fc2_fprop"] == {
            "method": "pipeline",
            "num_sm": 24,
            "cga_size": 2,
            "set_sm_margin": True,
            "num_splits": 4,
            "fp8_buf": False,
        }

    def test_shape(self):
        assert plan(cp=2).shape == (4096, 8192)
        assert plan().quantization_modes == ("NONE",)
        assert plan().ub_cfgs == ({},)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"method": "ring"}, "`method` \\('ring'\\).*must be one of"),
            ({**RING, "num_splits": 4}, "`num_splits` \\(4\\) has no effect.*'ring_exchange'"),
            ({**PIPELINE, "aggregate": True}, "`aggregate` \\(True\\) has no effect"),
            ({**RING, "fp8_buf": True}, "`fp8_buf` \\(True\\) has no effect"),
            ({**PIPELINE, "num_sm": 33}, "`num_sm` \\(33\\).*at most 32"),
            ({**PIPELINE, "num_sm": True}, "`num_sm` \\(True\\)"),
            (
                {**PIPELINE, "num_sm": 3},
                "`num_sm` \\(3\\) must be a multiple of `cga_size` \\(2\\)",
            ),
        ],
    )
    def test_refused(self, fields, message):
        with pytest.raises(ConfigurationError, match=message):
            GemmOverlap(**fields)


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"gemms": {"qkvv_fprop": RING}}, "'qkvv_fprop', which TransformerEngine would ignore"),
            ({"gemms": {"proj_wgrad": RING}}, "`proj_wgrad` cannot be set.*`proj_dgrad`"),
            ({"gemms": {"qkv_fprop": PIPELINE}}, "`qkv_fprop` \\(pipeline\\) gathers its input"),
            ({"gemms": {"qkv_fprop": {"method": "bulk"}}}, "`qkv_fprop` \\(bulk\\)"),
            ({"gemms": {"proj_fprop": {"method": "bulk"}}}, "use 'pipeline' or 'ring_exchange'"),
            ({"gemms": {"qkv_wgrad": RING}}, "`qkv_wgrad` \\(ring_exchange\\).*use 'bulk'"),
            ({"gemms": {"qkv_fprop": {**RING, "num_split": 4}}}, "must be a GemmOverlap or"),
            ({"gemms": {"qkv_fprop": {}}}, "must be a GemmOverlap or"),
            ({"gemms": {"qkv_dgrad": RING}}, "`fc1_dgrad` \\(bulk\\) and `qkv_dgrad`.*both"),
            ({"gemms": {**BOTH_DGRADS, "fc1_wgrad": {"method": "bulk"}}},
             "`fc1_wgrad` has nothing to hide"),
            ({"gemms": {"qkv_fprop": RING}, "all_gather": False}, "no effect with `all_gather`"),
            ({"gemms": {"fc2_fprop": RING}, "reduce_scatter": False},
             "no effect with `reduce_scatter`"),
            ({"gemms": {"fc1_wgrad": {"method": "bulk"}}, "bulk_wgrad": False},
             "no effect with `bulk_wgrad`"),
            ({"gemms": {"proj_fprop": {**PIPELINE, "fp8_buf": True}}}, "`fp8_buf` \\(True\\)"),
            ({"quantization": "mxfp8"}, "`quantization` \\('mxfp8'\\)"),
            ({"bootstrap_backend": "ucc"}, "`bootstrap_backend` \\('ucc'\\)"),
            (dict.fromkeys(("all_gather", "reduce_scatter", "bulk_dgrad", "bulk_wgrad"), False),
             "hides nothing"),
        ],
    )  # fmt: skip
    def test_refused(self, settings, message):
        with pytest.raises(ConfigurationError, match=message):
            TPCommOverlap(**settings)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"on_gpu": False}, "needs GPUs, which"),
            ({"te_version": None}, "needs TransformerEngine, which"),
            ({"on_gpu": False, "te_version": None}, "needs GPUs and TransformerEngine"),
            ({"tp": 1}, "`tp` \\(1\\) of at least 2"),
            ({"sequence_parallel": False}, "needs `sequence_parallel` \\(False\\)"),
            ({"precision": "32-true"}, "`precision` \\('32-true'\\)"),
            ({"precision": "16-mixed"}, "`precision` \\('16-mixed'\\)"),
            ({"tp": 16}, "all 16 ranks.*inside one NVLink domain, which has 8"),
            ({"tp": 3, "gpus_per_nvlink_domain": 8}, "use a `tp` that divides 8"),
            ({"seq_length": None}, "needs `seq_length` \\(None\\)"),
            ({"hidden_size": None}, "needs `hidden_size` \\(None\\).*model_dims"),
            ({"micro_batch_size": None}, "needs `micro_batch_size` \\(None\\)"),
            ({"seq_length": 4095, "micro_batch_size": 1},
             "\\(4095\\) to be a multiple of `cp` \\(1\\)"),
            ({"seq_length": 4, "micro_batch_size": 1},
             "\\(4\\) to be a multiple of `num_splits` \\(4\\) of `proj_fprop` x `tp` \\(2\\)"),
        ],
    )  # fmt: skip
    def test_refused_in_a_run(self, changes, message):
        with pytest.raises(ConfigurationError, match=message):
            plan(**changes)

    def test_odd_rings_do_not_aggregate(self):
        asked = TPCommOverlap(gemms={"qkv_fprop": {**RING, "aggregate": True}})
        with pytest.raises(ConfigurationError, match="even `tp` \\(3\\)"):
            plan(asked, tp=3, gpus_per_nvlink_domain=3, seq_length=12 * 256)
        assert plan(asked, tp=4).ub_cfgs[0]["qkv_fprop"]["aggregate"]

    def test_mixed_modes_need_a_recent_version(self):
        with pytest.raises(ConfigurationError, match=r"needs TransformerEngine 2\.7 for.*and 2\.5"):
            plan(TPCommOverlap(quantization="fp8+none"), te_version=(2, 5))

    def test_a_microbatch_of_another_shape(self):
        plan().check_microbatch(4096, 2)
        for seq, size in ((4096, 1), (2048, 2), (2048, 4)):
            with pytest.raises(ConfigurationError, match=f"A microbatch of {size} x {seq} tokens"):
                plan().check_microbatch(seq, size)

    def test_the_models_quantization(self):
        check_quantization(TPCommOverlap(), fp8=False, bf16_at_ends=True)
        check_quantization(TPCommOverlap(quantization="fp8"), fp8=True, bf16_at_ends=False)
        with pytest.raises(ConfigurationError, match=r"TPCommOverlap\(quantization='fp8\+none'\)"):
            check_quantization(TPCommOverlap(quantization="fp8"), fp8=True, bf16_at_ends=True)

    def test_fields(self):
        assert userbuffers_fields(None) == {"tp_comm_overlap": False}
        fields = userbuffers_fields(TPCommOverlap())
        assert fields["tp_comm_bulk_wgrad"]
        assert not fields["tp_comm_overlap_rs_dgrad"]
        fields = userbuffers_fields(TPCommOverlap(gemms=BOTH_DGRADS))
        assert fields["tp_comm_overlap_rs_dgrad"]
        assert not fields["tp_comm_bulk_dgrad"]
        assert not fields["tp_comm_bulk_wgrad"]

    def test_fields_exist_in_the_engine(self):
        from megatron.core.model_parallel_config import ModelParallelConfig

        known = ModelParallelConfig.__dataclass_fields__
        assert set(userbuffers_fields(TPCommOverlap())) <= set(known)

    def test_multicast_stays_off_where_it_is(self):
        assert userbuffers_environment({"NCCL_NVLS_ENABLE": "0"}) == {"UB_SKIPMC": "1"}
        assert userbuffers_environment({"NCCL_NVLS_ENABLE": "1"}) == {}
        assert userbuffers_environment({}) == {}


def _te_base() -> Path | None:
    """The installed TransformerEngine's base.py, or the one that LIGHTNING_MCORE_TE_BASE names.

    Only its text is read, which needs neither CUDA nor its library.
    """
    named = os.environ.get("LIGHTNING_MCORE_TE_BASE")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0], "pytorch", "module", "base.py")


class _Kind(Enum):
    AG = 0
    RS = 1


class _Loaded:
    """TransformerEngine's own ``initialize_ub`` around stand-ins for its library and torch."""

    def __init__(self, path: Path) -> None:
        wanted = ("initialize_ub", "destroy_ub", "UserBufferQuantizationMode")
        body = [n for n in ast.parse(path.read_text()).body if getattr(n, "name", "") in wanted]
        dist = types.SimpleNamespace(
            Backend=object,
            is_initialized=lambda: True,
            is_mpi_available=lambda: False,
            is_gloo_available=lambda: True,
            is_backend_available=lambda name: True,
            new_group=lambda backend: backend,
            get_rank=lambda group=None: 1,
            get_world_size=lambda group=None: 8,
            new_subgroups_by_enumeration=lambda ranks, backend: ("group", None),
            get_process_group_ranks=lambda group: [0, 1],
        )
        torch = types.SimpleNamespace(
            distributed=dist,
            dtype=object,
            bfloat16="bf16",
            uint8="u8",
            compiler=types.SimpleNamespace(reset=lambda: None),
        )
        tex = types.SimpleNamespace(
            device_supports_multicast=lambda: True,
            ubuf_built_with_mpi=lambda: False,
            CommOverlapHelper=lambda *a: "helper",
            get_stream_priority_range=lambda: (0, -5),
            CommOverlapType=_Kind,
            CommOverlapP2P=lambda shape, dtype, helper, tp, kind, **kw: (
                "ring", shape, dtype, kind.name, kw),
            CommOverlap=lambda shape, dtype, helper, tp, comm_type, **kw: (
                "chunks", shape, dtype, comm_type.name, kw),
        )  # fmt: skip
        self.names: dict[str, Any] = {
            "torch": torch, "tex": tex, "warnings": warnings, "os": os, "Enum": Enum,
            "_ub_communicators": None, "_ub_with_cublasmp": False, "_ub_initialized": False,
            "_MIN_STREAM_PRIORITY": None, "_MAX_STREAM_PRIORITY": None, "_NUM_MAX_UB_STREAMS": 3,
            "layers_atomic_ring_exchange": [], **vars(typing),
        }  # fmt: skip
        exec(compile(ast.Module(body=body, type_ignores=[]), str(path), "exec"), self.names)
        self.UserBufferQuantizationMode = self.names["UserBufferQuantizationMode"]
        self.initialize_ub = self.names["initialize_ub"]
        self.destroy_ub = self.names["destroy_ub"]

    def buffers(self, plan: Any) -> dict[tuple[str, str], Any]:
        """What ``plan`` makes, by GEMM and mode."""
        from lightning_mcore._mcore.userbuffers import _initialize

        self.names["_ub_communicators"] = None
        _initialize(self, plan)
        made = self.names["_ub_communicators"]
        return {(name, mode.name): buffer for (name, mode), buffer in made.items()}


@pytest.mark.skipif(_te_base() is None, reason="needs the source of TransformerEngine 2.7 or newer")
class TestTransformerEngine:
    """Our tables in the hands of the real ``initialize_ub``."""

    @pytest.fixture(scope="class")
    def te(self):
        return _Loaded(_te_base())

    def test_defaults(self, te):
        made = te.buffers(plan())
        assert len(made) == 12
        kind, shape, dtype, transfer, _ = made["proj_fprop", "NONE"]
        assert (kind, shape, transfer) == ("chunks", [8192, 8192], "RS")
        assert "bfloat16" in str(dtype)

    def test_rings(self, te):
        """What True means; the buffers of wgrad GEMMs, which then hide nothing, are made anyhow."""
        made = te.buffers(plan(TPCommOverlap.rings()))
        made = {name: made[name, mode] for name, mode in made if not name.endswith("wgrad")}
        assert {kind for kind, *_ in made.values()} == {"ring"}
        scattering = {"proj_fprop", "fc2_fprop", "qkv_dgrad", "fc1_dgrad"}
        assert {name for name, (_, _, _, way, _) in made.items() if way == "RS"} == scattering

    def test_every_method_of_every_gemm(self, te):
        for name, methods in _ALLOWED.items():
            for method in methods:
                gemms = {name: {"method": method}}
                if name.endswith("dgrad") and len(methods) == 3 and method != "bulk":
                    gemms = {other: {"method": method} for other in ("qkv_dgrad", "fc1_dgrad")}
                made = te.buffers(plan(TPCommOverlap(gemms=gemms)))
                kind, _, _, transfer, settings = made[name, "NONE"]
                ring = method == "ring_exchange"
                assert kind == ("ring" if ring else "chunks"), (name, method)
                assert settings["num_comm_sm"] == (1 if ring else 16)
                assert settings["comm_cga_size"] == (1 if ring else 2)
                assert settings["set_sm_margin"] == (not ring)
                scatters = name in ("proj_fprop", "fc2_fprop") or name.endswith("wgrad")
                if name in ("qkv_dgrad", "fc1_dgrad") and method != "bulk":
                    scatters = True
                assert transfer == ("RS" if scatters else "AG"), (name, method)

    def test_two_modes_with_scattering_dgrads(self, te):
        """TransformerEngine fails on the table itself; ours differs in the second mode."""
        ours = plan(TPCommOverlap(gemms=BOTH_DGRADS, quantization="fp8+none"))
        made = te.buffers(ours)
        for mode in ("FP8", "NONE"):
            assert made["qkv_dgrad", mode][0] == "ring"
            assert made["fc1_dgrad", mode][0] == "chunks"
            assert made["qkv_dgrad", mode][4]["comm_cga_size"] == 1
            assert {made[name, mode][3] for name in ("qkv_dgrad", "fc1_dgrad")} == {"RS"}
        assert len(made) == 24
        te.names["_ub_communicators"] = None
        modes = [te.UserBufferQuantizationMode.FP8, te.UserBufferQuantizationMode.NONE]
        table = {name: dict(entry) for name, entry in ours.ub_cfgs[0].items()}
        with pytest.raises(ValueError, match=r"list\.remove"):
            te.initialize_ub([8192, 8192], 2, quantization_modes=modes, ub_cfgs=table)

    def test_fp8_buffers(self, te):
        gemms = {"proj_fprop": {**PIPELINE, "fp8_buf": True}}
        made = te.buffers(plan(TPCommOverlap(gemms=gemms, quantization="fp8")))
        assert made["proj_fprop", "FP8"][2] == "u8"
        assert made["qkv_fprop", "FP8"][2] == "u8"
        assert made["fc2_fprop", "FP8"][2] != "u8"

    def test_a_misspelt_gemm_is_ignored_there(self, te):
        """Why we check names."""
        te.names["_ub_communicators"] = None
        modes = [te.UserBufferQuantizationMode.NONE]
        te.initialize_ub([8, 8], 2, quantization_modes=modes, ub_cfgs={"qkvv_fprop": dict(RING)})
        assert len(te.names["_ub_communicators"]) == 12


class _OldBase:
    """The signature before 2.7: no modes."""

    def initialize_ub(self, **arguments: Any) -> None:
        self.arguments = arguments


def test_older_versions_get_their_own_arguments():
    from lightning_mcore._mcore.userbuffers import _initialize

    base = _OldBase()
    _initialize(base, plan(TPCommOverlap(quantization="fp8", gemms={"qkv_fprop": RING})))
    assert base.arguments["use_fp8"] is True
    assert "quantization_modes" not in base.arguments
    assert base.arguments["ub_cfgs"]["qkv_fprop"]["method"] == "ring_exchange"
    assert base.arguments["shape"] == [8192, 8192]


def test_a_model_without_such_layers_is_refused():
    """The engine's local layers take the switch and ignore it."""
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2))
    chunk.config = types.SimpleNamespace(fp8=None)
    with pytest.raises(ConfigurationError, match="TransformerEngine's layers only"):
        check_model(TPCommOverlap(), [chunk])
    chunk[0].ub_name = "qkv"
    check_model(TPCommOverlap(), [chunk])
    with pytest.raises(ConfigurationError, match="must be 'none'"):
        check_model(TPCommOverlap(quantization="fp8"), [chunk])


def test_once_per_process(monkeypatch):
    from lightning_mcore._mcore import userbuffers

    monkeypatch.setattr(userbuffers, "_live", [plan()])
    userbuffers.start_userbuffers(plan())
    with pytest.raises(ConfigurationError, match=r"buffers \(4096, 8192\).*once per process"):
        userbuffers.start_userbuffers(plan(cp=2))


def test_settings_are_read_from_yaml():
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MCoreStrategy, "strategy")

    def read(text: str) -> Any:
        values = parser.parse_string(f"strategy: {{tp: 2, tp_comm_overlap: {text}}}")
        return parser.instantiate(values).strategy._request.switches.tp_comm_overlap

    assert read("true") is True
    assert read("auto") == "auto"
    assert read("{quantization: fp8, gemms: {proj_fprop: {method: ring_exchange, num_sm: 2}}}") == (
        TPCommOverlap(
            quantization="fp8",
            gemms={"proj_fprop": GemmOverlap(method="ring_exchange", num_sm=2)},
        )
    )
    with pytest.raises(ValueError, match="'qkvv', which TransformerEngine would ignore"):
        read("{gemms: {qkvv: {method: bulk}}}")


class TestSwitch:
    """What becomes of the switch, with facts of a machine that can do it."""

    def decide(self, request: dict[str, Any], **facts: Any) -> tuple[Any, list[Any]]:
        layout = resolve_layout(ParallelSizes(tp=2), 4, 0)
        known: dict[str, Any] = {
            "engine_version": (0, 19, 2),
            "on_gpu": True,
            "precision": "bf16-mixed",
            "has_te_or_apex": True,
            "te_version": (2, 20),
            "topology": Topology(),
            "dims": ModelDims(seq_length=4096, hidden_size=8192),
        }
        asked = SwitchRequest(**{"micro_batch_size": 1, **request})
        switches, findings = plan_switches(asked, layout, Facts(**{**known, **facts}))
        return switches.tp_comm_overlap, [f for f in findings if f.severity == "error"]

    @pytest.mark.parametrize("asked", [True, TPCommOverlap(gemms={"qkv_fprop": RING})])
    def test_on(self, asked):
        switch, errors = self.decide({"tp_comm_overlap": asked})
        assert switch.effective is True
        assert switch.requested is True
        assert not errors

    @pytest.mark.parametrize("request_", [{"tp_comm_overlap": True}, {"comm": "max"}])
    def test_true_means_rings(self, request_):
        asked = SwitchRequest(**request_).userbuffers
        assert asked == TPCommOverlap.rings()
        methods = {name: entry.method for name, entry in asked.gemms.items()}
        assert methods == dict.fromkeys(
            ("proj_fprop", "fc2_fprop", "qkv_dgrad", "fc1_dgrad"), "ring_exchange"
        )
        assert userbuffers_fields(asked) | {"tp_comm_bootstrap_backend": ""} == {
            "tp_comm_overlap": True,
            "tp_comm_overlap_ag": True,
            "tp_comm_overlap_rs": True,
            "tp_comm_overlap_rs_dgrad": True,
            "tp_comm_bulk_dgrad": False,
            "tp_comm_bulk_wgrad": False,
            "tp_comm_bootstrap_backend": "",
        }
        assert SwitchRequest(tp_comm_overlap=TPCommOverlap()).userbuffers.gemms == {}

    def test_auto_is_on_only_at_the_most(self):
        assert not self.decide({})[0].effective
        assert self.decide({"comm": "max"})[0].effective

    def test_what_is_missing_is_an_error_where_it_was_asked_for(self):
        dims = ModelDims(seq_length=4096)
        switch, errors = self.decide({"tp_comm_overlap": True}, dims=dims)
        assert [error.code for error in errors] == ["tp-overlap-plan"]
        assert "needs `hidden_size` (None)" in errors[0].message
        assert "use model_dims = {'hidden_size': ...}" in errors[0].message
        switch, errors = self.decide({"comm": "max"}, dims=dims)
        assert not errors
        assert not switch.effective
        assert "`hidden_size` (None)" in switch.reason
