"""Rules for switches about computing itself: fused accumulation of gradients, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_mcore.config import CudaGraphs, SwitchRequest
from lightning_mcore.findings import Findings
from lightning_mcore.layout import Layout
from lightning_mcore.switches.values import Facts, Switch

__all__ = ["check_graphs_with_experts", "cuda_graphs", "gradient_accumulation_fusion"]


def gradient_accumulation_fusion(
    request: SwitchRequest, facts: Facts, findings: Findings
) -> Switch[bool]:
    """Weight gradients added to the gradient buffer by the matrix product that makes them.

    TransformerEngine's layers do it themselves. The engine's own linear layers, of which a GPT has
    its output layer, call a kernel of Apex (tensor_parallel/layers.py); without Apex,
    ``_mcore/te_bindings.py`` lets TransformerEngine's matrix product stand in.
    """
    name, asked = "gradient_accumulation_fusion", request.gradient_accumulation_fusion
    obstacles = []
    if not facts.on_gpu:
        obstacles.append(("needs-gpu", "GPUs: its kernels run there only", "accelerator='gpu'"))
    if facts.native_model:
        obstacles.append(
            ("needs-megatron-layers", "Megatron layers, and the model has only plain torch modules",
             "a factory of Megatron chunks")
        )  # fmt: skip
    if not facts.has_fused_wgrad and facts.te_version is None:
        obstacles.append(
            ("needs-kernel", "Apex or TransformerEngine: theirs are the matrix products that add to"
             " a buffer", "the extra lightning-mcore[te]")
        )  # fmt: skip
    if asked is True:
        for code, needed, fix in obstacles:
            findings.error(
                f"grad-fusion-{code}",
                f"`{name}` (True) needs {needed}",
                f"use {fix}, or {name}=False",
                gradient_accumulation_fusion=asked,
                on_gpu=facts.on_gpu,
            )
        by = "" if facts.has_fused_wgrad else ": TransformerEngine's kernel stands in for Apex's"
        return Switch(name, asked, True, f"requested{by}")
    if asked is False:
        return Switch(name, asked, False, "requested")
    if obstacles:
        return Switch(name, asked, False, f"needs {obstacles[0][1].split(':')[0]}", "assert")
    if facts.has_fused_wgrad:
        return Switch(name, asked, True, "Apex is installed", "recipe")
    reason = "saves a pass over the weight gradients, which are then rounded less: measure it"
    return Switch(name, asked, False, reason, "candidate")


def cuda_graphs(
    request: SwitchRequest, layout: Layout, facts: Facts, findings: Findings
) -> Switch[CudaGraphs]:
    """Kernels of layers, replayed from CUDA graphs in training."""
    name, asked = "cuda_graphs", request.cuda_graphs
    if asked is False:
        return Switch(name, asked, False, "requested")
    obstacles = _graph_obstacles(
        "transformer_engine" if asked == "auto" else str(asked), layout, facts
    )
    if asked != "auto":
        for code, needed, fix in obstacles:
            findings.error(
                code,
                f"`{name}` ({asked!r}) {needed}",
                f"use {fix}, or {name}=False",
                cuda_graphs=asked,
                engine_version=facts.version_text,
                pp=layout.pp,
                on_gpu=facts.on_gpu,
                precision=facts.precision,
            )
        return Switch(name, asked, asked, "requested")
    if obstacles:
        return Switch(name, asked, False, obstacles[0][1].split(": ")[0], "assert")
    reason = "helps where the host launches kernels slower than the GPU runs them: measure it"
    return Switch(name, asked, False, reason, "candidate")


def check_graphs_with_experts(graphs: Switch[CudaGraphs], overlap: object, found: Findings) -> None:
    """What graphs and the overlap of expert layers exclude.

    Args:
        graphs: As resolved.
        overlap: Effective ``overlap_moe``.
        found: Where errors go.
    """
    if graphs.effective and overlap == "1f1b":
        found.error(
            "cuda-graphs-exclude-1f1b-overlap",
            f"`cuda_graphs` ({graphs.effective!r}) replays whole layers, and `overlap_moe` ('1f1b')"
            " takes them apart to run those of two microbatches in turn",
            "use overlap_moe=False, or cuda_graphs=False",
            cuda_graphs=graphs.effective,
            overlap_moe=overlap,
        )


def _graph_obstacles(kind: str, layout: Layout, facts: Facts) -> list[tuple[str, str, str]]:
    """Code, what is needed or excluded, and a way out, for all that is known of the run."""
    found = []
    if kind == "full_iteration":
        # full_cuda_graph.py, FullCudaGraphWrapper.__call__: after its warm-up it only replays.
        found.append(
            (
                "cuda-graphs-full-iteration",
                "replays one recorded step: training_step, its logs and its random numbers would"
                " run once, when it is captured, and never again",
                "cuda_graphs='transformer_engine', which leaves the step to run",
            )
        )
    if not facts.on_gpu:
        found.append(
            ("cuda-graphs-need-gpu", "needs GPUs: the CPU has no kernels to replay", "a GPU")
        )
    if facts.native_model:
        found.append(
            (
                "cuda-graphs-need-megatron-layers",
                "needs Megatron layers, and the model has only plain torch modules",
                "a factory of Megatron chunks",
            )
        )
    if facts.engine_version < (0, 19):
        found.append(
            (
                "cuda-graphs-need-engine",
                f"needs megatron-core 0.19 or newer, not {facts.version_text}: older ones have"
                " other settings and rules for graphs, which this strategy does not know",
                "megatron-core 0.19",
            )
        )
    if kind == "transformer_engine" and facts.te_version is None:
        # cuda_graphs.py, TECudaGraphHelper.__init__.
        found.append(
            (
                "cuda-graphs-need-te",
                "needs TransformerEngine: it captures",
                "the extra lightning-mcore[te]",
            )
        )
    if kind == "transformer_engine" and not facts.precision.startswith("bf16"):
        # module.py, GraphableMegatronModule.get_layer_static_inputs: replay copies into these.
        found.append(
            (
                "cuda-graphs-need-bf16",
                f"needs bf16, not `precision` ({facts.precision!r}): the engine makes the inputs of"
                " its graphs in bf16, and others would be rounded to it",
                "precision='bf16-mixed'",
            )
        )
    if kind == "local" and layout.pp > 1:
        # schedules.py, deallocate_output_tensor; cuda_graphs.py, _CudagraphReplayNode.forward,
        # returns that tensor at every replay.
        found.append(
            (
                "cuda-graphs-local-needs-one-stage",
                f"needs one stage, not `pp` ({layout.pp}): the schedule empties the output of a"
                " stage once it is sent, and the engine's graphs go on to return that very tensor",
                "cuda_graphs='transformer_engine'",
            )
        )
    if kind == "local" and facts.dims.num_moe_experts is not None:
        found.append(
            (
                "cuda-graphs-local-needs-dense-layers",
                f"needs dense layers, not `num_moe_experts` ({facts.dims.num_moe_experts}): the"
                " engine would replay parts of expert layers in validation too",
                "cuda_graphs='transformer_engine'",
            )
        )
    if _has_expandable_segments(facts.environment) and (
        facts.environment.get("NCCL_GRAPH_REGISTER") != "0"
    ):
        # cuda_graphs.py, TECudaGraphHelper.__init__, asserts it.
        found.append(
            (
                "cuda-graphs-exclude-expandable-segments",
                "excludes expandable_segments:True of torch's allocator, unless"
                " NCCL_GRAPH_REGISTER=0: NCCL would register memory that moves",
                "NCCL_GRAPH_REGISTER=0 in the environment",
            )
        )
    return found


def _has_expandable_segments(environment: Mapping[str, str]) -> bool:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    texts = (environment.get(name, "").replace(" ", "").lower() for name in names)
    return any("expandable_segments:true" in text for text in texts)
