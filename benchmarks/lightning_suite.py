"""Runs Lightning's own tests with MCoreStrategy in place of the Trainer's default strategy.

    python benchmarks/lightning_suite.py --tests ~/pytorch-lightning/tests/tests_pytorch
    python benchmarks/lightning_suite.py --tests ... --ranks 2 --select loops models/test_hooks.py

The tests come from a source checkout of Lightning (a 2.6 tag) and stay as they are. A pytest plugin
(``lightning_suite_plugin``) gives every ``Trainer`` that leaves ``strategy`` at its default an
``MCoreStrategy()`` on the CPU, and lets ``torch.load`` read the Lightning part of our checkpoints,
which are directories. What is counted:

* passed, failed: tests that ran a Trainer on the strategy;
* not applicable, with a reason each: a test that names its own strategy, accelerator or number of
  devices, that never runs a Trainer, that is skipped by Lightning, that fails here under a strategy
  of Lightning as well (its default, at one rank; DDPStrategy), that meets a stated refusal
  (``REFUSALS``), or that is in ``EXCLUDED``.

Tests in ``EXCLUDED`` run too; one that passes is counted as passed and named, so that the table
does not outlive its reasons. With ``--ranks 2`` every rank runs the same tests as a process of its
own, started from outside, and a test passes if it passes on both.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from lightning_suite_plugin import NOT_OURS, RANKS, SHARED, STRATEGY

SELECTIONS = {
    1: (
        "loops",
        "trainer/logging_",
        "trainer/optimization",
        "callbacks",
        "models/test_hooks.py",
        "core",
    ),
    2: (
        "loops/test_loops.py",
        "loops/test_evaluation_loop.py",
        "loops/test_prediction_loop.py",
        "loops/test_training_loop.py",
        "trainer/logging_",
        "trainer/optimization/test_optimizers.py",
        "callbacks/test_early_stopping.py",
        "callbacks/test_lr_monitor.py",
        "models/test_hooks.py",
    ),
}

EXCLUDED: tuple[tuple[str, str], ...] = (
    (
        "trainer/optimization/test_manual_optimization.py::test_lr_schedulers_reduce_lr_on_plateau*",
        "refused: manual optimization",
    ),
    (
        "models/test_hooks.py::test_trainer_model_hook_system_fit[*-True-kwargs0]",
        "the hook `backward` is not called, since the engine's schedule runs the backward pass;"
        " all other hooks come, in Lightning's order",
    ),
    (
        "trainer/optimization/test_backward_calls.py::*",
        "counts calls of torch.Tensor.backward; the engine calls autograd directly",
    ),
    (
        "loops/optimization/test_automatic_loop.py::test_warning_invalid_trainstep_output*",
        "expects Lightning's words for a step that returns no loss; ours is a ConfigurationError",
    ),
    (
        "trainer/logging_/test_train_loop_logging.py::test_logging_raises",
        "its steps return no loss, which is refused before the error that it expects",
    ),
    (
        "loops/optimization/test_automatic_loop.py::test_skip_training_step_not_allowed*",
        "assigns strategy.world_size, which parallel strategies of Lightning do not allow",
    ),
    (
        "loops/optimization/test_closure.py::test_optimizer_step_no_closure_raises",
        "an optimizer that does not call the closure is no error: the strategy runs it",
    ),
    (
        "models/test_hooks.py::test_load_from_checkpoint_hook_calls*",
        "saves a checkpoint of a model that no Trainer has run",
    ),
    (
        "core/test_saving.py::*",
        "reads weights from the checkpoint's file with load_from_checkpoint",
    ),
    (
        "core/test_lightning_module.py::test_lightning_module_configure_gradient_clipping",
        "clips param.grad; the engine keeps gradients in param.main_grad",
    ),
    (
        "core/test_lightning_optimizer.py::*_automatic_optimization_optimizer_step",
        "counts calls of SGD.step, to which the engine's own optimizer adds",
    ),
    (
        "core/test_metric_result_integration.py::test_result_collection_reload*",
        "reads a logged value within the step; values are those of all ranks after it",
    ),
    (
        "callbacks/test_stochastic_weight_avg.py::*",
        "refused: StochasticWeightAveraging, WeightAveraging",
    ),
    (
        "callbacks/test_weight_averaging.py::*",
        "refused: StochasticWeightAveraging, WeightAveraging",
    ),
    (
        "callbacks/test_finetuning_callback.py::*",
        "parameters that become trainable during a run, which the engine does not know",
    ),
    (
        "callbacks/test_pruning.py::test_permanent_when_model_is_saved_multiple_times*",
        "reads weights from the checkpoint's file",
    ),
    (
        "callbacks/test_timer.py::test_timer_resume_training",
        "expects callbacks to be restored before on_fit_start; sharded strategies load after it",
    ),
    (
        "callbacks/test_callbacks.py::test_resume_callback_state_saved_by_type_stateful",
        "Lightning does not hand fit(weights_only=False) to strategies that load after setup",
    ),
    (
        "models/test_hooks.py::test_trainer_model_hook_system_fit_no_val_and_resume_*",
        "expects on_load_checkpoint before configure_optimizers; sharded strategies load after it",
    ),
    (
        "callbacks/test_early_stopping.py::test_early_stopping_squeezes",
        "calls the callback by hand, without a run of the Trainer",
    ),
    (
        "loops/test_loops.py::test_validation_during_gradient_accumulation_window",
        "looks at param.grad; the engine keeps gradients in param.main_grad",
    ),
    (
        "loops/test_training_epoch_loop.py::test_resume_mid_epoch_warning",
        "expects a warning that data will repeat; plain loaders resume where they stopped",
    ),
    (
        "loops/test_loops.py::test_fit_loop_save_and_restore_dataloaders*-False-*",
        "expects no position of plain loaders in the checkpoint; they have one here",
    ),
    (
        "loops/test_loops.py::test_fit_loop_save_and_restore_dataloaders*batches_before5*",
        "expects plain loaders to start anew after a resume; they go on where they stopped",
    ),
    (
        "loops/test_evaluation_loop_flow.py::test__eval_step__flow",
        "drives a loop by hand, without the Trainer's setup of the strategy",
    ),
    (
        "loops/test_training_loop_flow_scalar.py::test_training_step_no_return_when_even",
        "drives a loop by hand after the run, when the strategy's part of it is gone",
    ),
    (
        "loops/test_fetchers.py::test_fetching_dataloader_iter_opt*",
        "expects an error for a log without batch_size, which the strategy knows",
    ),
    (
        "trainer/logging_/test_logger_connector.py::test_fx_validator_integration",
        "the error for a log in predict_step comes at the end of the step, not in it",
    ),
)
"""Pattern of a test's name below ``tests_pytorch`` -> why it cannot hold under this strategy."""

EXCLUDED_AT_TWORANKS: tuple[tuple[str, str], ...] = (
    (
        "trainer/logging_/test_eval_loop_logging.py::test_eval_logging_auto_reduce",
        "expects the value of its own process; logged values are those of all data-parallel ranks",
    ),
    (
        "trainer/logging_/test_train_loop_logging.py::test_log_works_in_train_callback",
        "expects the value of its own process; logged values are those of all data-parallel ranks",
    ),
    (
        "trainer/logging_/test_train_loop_logging.py::test__training_step__log_max_reduce_fx*SUM*",
        "expects the sum of its own process; the sum is over all data-parallel ranks",
    ),
    (
        "trainer/logging_/test_eval_loop_logging.py::test_log_works_in_test_callback",
        "expects the value of its own process; logged values are those of all data-parallel ranks",
    ),
    (
        "trainer/logging_/test_eval_loop_logging.py::test_multiple_dataloaders_reset*",
        "expects the samples of its own process as the weight of a log; it is those of all ranks",
    ),
)
"""The same for ``--ranks 2`` only."""

REFUSALS: tuple[tuple[str, str], ...] = (
    ("`automatic_optimization` (False)", "refused: manual optimization"),
    ("`backward` is overridden", "refused: a LightningModule with its own backward"),
    ("copy and swap the parameters", "refused: StochasticWeightAveraging, WeightAveraging"),
    ("through the closure that its step() requires", "refused: optimizers that need a closure"),
    ("trainable parameters are in no group of the optimizer", "refused: training no parameters"),
)
"""Part of the message of a ConfigurationError of ours -> what is refused."""

_ENGINE_WARNINGS = (
    "ignore:`load_state_dict` is deprecated:FutureWarning",
    "ignore:`save_state_dict` is deprecated:FutureWarning",
    "ignore:`torch.distributed.reduce_scatter_tensor` is deprecated:FutureWarning",
    "ignore:`torch.distributed.all_gather_into_tensor` is deprecated:FutureWarning",
)
"""What the engine's own calls warn of, which Lightning's settings make an error."""


def run_tests(
    tests: Path, select: list[str], *, ranks: int, strategy: str, timeout: int, verbose: bool
) -> dict[str, dict[str, object]]:
    """Runs ``select`` (paths or test names below ``tests``); returns a record for each test."""
    with tempfile.TemporaryDirectory(prefix="lightning-suite-") as folder:
        shared = Path(folder)
        (shared / "cwd").mkdir()
        # The tests run in another directory, so relative entries would not be found.
        paths = [os.path.abspath(entry) for entry in sys.path[1:] if entry]
        processes = []
        port = _first_port()
        for rank in range(ranks):
            log = (shared / f"log.{rank}").open("w")
            environment = {
                **os.environ,
                RANKS: str(ranks),
                STRATEGY: strategy,
                SHARED: str(shared),
                "OMP_NUM_THREADS": "1",
                # Started from outside, also where there is one: a launcher would be waited for.
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parent), str(tests.parent), *paths]
                ),
            }
            command = [
                *(sys.executable, "-m", "pytest", "-p", "lightning_suite_plugin"),
                *("-c", str(tests.parent.parent / "pyproject.toml")),
                *("-p", "no:cacheprovider", "--color=no", "-q", "--tb=short"),
                *(option for text in _ENGINE_WARNINGS for option in ("-W", text)),
                *(f"--timeout={timeout}", "--timeout-method=signal"),
                *(str(tests / name) for name in select),
            ]
            processes.append(
                subprocess.Popen(
                    command, cwd=shared / "cwd", env=environment, stdout=log, stderr=log
                )
            )
        codes = [process.wait() for process in processes]
        records = [_read(shared / f"results.{rank}.jsonl") for rank in range(ranks)]
        if verbose or not all(records):
            for rank in range(ranks):
                print((shared / f"log.{rank}").read_text()[-4000:], file=sys.stderr)
        if any(code not in (0, 1) for code in codes):
            print(f"  pytest ended with {codes}", file=sys.stderr)
        return _merge(records)


def _read(path: Path) -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["outcome"] == "started":
                record = {
                    **record,
                    "outcome": "failed",
                    "message": "the test process ended in this test",
                    "ran": True,
                }
            results[record["name"]] = record
    return results


def _merge(ranks: list[dict[str, dict[str, object]]]) -> dict[str, dict[str, object]]:
    """One record per test: the worst outcome over ranks."""
    order = ("failed", "skipped", "passed")
    merged = {}
    for name in dict.fromkeys(name for results in ranks for name in results):
        records = [
            results.get(name, {"outcome": "failed", "message": "never started", "ran": False})
            for results in ranks
        ]
        outcomes = [str(record["outcome"]) for record in records]
        worst = min(range(len(records)), key=lambda rank: order.index(outcomes[rank]))
        merged[name] = {**records[worst], "ran": any(record["ran"] for record in records)}
        if len(ranks) > 1 and outcomes[worst] == "failed":
            failed = [rank for rank, outcome in enumerate(outcomes) if outcome == "failed"]
            merged[name]["message"] = f"(rank {failed}) {records[worst]['message']}"
    return merged


def _first_port() -> int:
    """Of 500 ports below those that the system hands out by itself."""
    return 20000 + os.getpid() * 7919 % 10000


def excluded_reason(name: str, ranks: int) -> str | None:
    """Why a test is in the table, if it is."""
    for pattern, reason in EXCLUDED + (EXCLUDED_AT_TWORANKS if ranks > 1 else ()):
        if fnmatch.fnmatchcase(name, pattern.replace("[", "[[]")):
            return reason
    return None


def classify(
    results: dict[str, dict[str, object]],
    controls: dict[str, dict[str, dict[str, object]]],
    ranks: int,
) -> dict[str, tuple[str, str]]:
    """Verdict and reason for each test: ``passed``, ``failed`` or ``not applicable``."""
    verdicts = {}
    for name, record in results.items():
        outcome, message = record["outcome"], str(record["message"])
        reason = excluded_reason(name, ranks)
        if outcome == "skipped":
            ours = message.startswith(NOT_OURS)
            verdict = (
                "not applicable",
                message.removeprefix(NOT_OURS) if ours else f"Lightning skips it: {message}",
            )
        elif outcome == "passed" and not record["ran"]:
            verdict = ("not applicable", "the test never starts a Trainer on the strategy")
        elif outcome == "passed":
            verdict = ("passed", "in EXCLUDED, but passes" if reason else "")
        elif reason is not None:
            verdict = ("not applicable", reason)
        elif refusal := next((why for part, why in REFUSALS if part in message), None):
            verdict = ("not applicable", refusal)
        elif failing := [
            control
            for control, outcomes in controls.items()
            if outcomes.get(name, {}).get("outcome") == "failed"
        ]:
            verdict = ("not applicable", f"fails here under {failing[0]} as well")
        else:
            verdict = ("failed", message)
        verdicts[name] = verdict
    return verdicts


def main() -> int:
    """Runs, classifies and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tests", type=Path, required=True, help="tests/tests_pytorch of Lightning"
    )
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    parser.add_argument("--select", nargs="+", help="files, directories or tests below --tests")
    parser.add_argument("--timeout", type=int, default=120, help="seconds per test")
    parser.add_argument("--report", type=Path, help="writes verdicts, messages and traces as JSON")
    parser.add_argument("--verbose", action="store_true", help="prints the end of pytest's output")
    args = parser.parse_args()
    tests = args.tests.resolve()
    if not (tests / "conftest.py").exists():
        parser.error(
            f"{tests} has no conftest.py; give tests/tests_pytorch of a Lightning checkout"
        )
    control_strategies = {"default": "Lightning's default strategy", "ddp": "DDPStrategy"}
    if args.ranks > 1:
        del control_strategies["default"]
    totals: dict[str, Counter[str]] = {}
    reasons: dict[str, list[str]] = defaultdict(list)
    failed, stale, report = [], [], {}
    for selected in args.select or SELECTIONS[args.ranks]:
        begin = time.monotonic()
        settings = {"ranks": args.ranks, "timeout": args.timeout, "verbose": args.verbose}
        results = run_tests(tests, [selected], strategy="mcore", **settings)
        if args.report is not None:
            args.report.write_text(json.dumps(results, indent=1))
        suspects = [
            name
            for name, record in results.items()
            if record["outcome"] == "failed"
            and excluded_reason(name, args.ranks) is None
            and not any(part in str(record["message"]) for part, _ in REFUSALS)
        ]
        controls = {
            title: run_tests(tests, suspects, strategy=strategy, **settings) if suspects else {}
            for strategy, title in control_strategies.items()
        }
        verdicts = classify(results, controls, args.ranks)
        totals[selected] = Counter(verdict for verdict, _ in verdicts.values())
        for name, (verdict, reason) in verdicts.items():
            report[name] = {**results[name], "verdict": verdict, "reason": reason}
            if verdict == "not applicable":
                reasons[reason].append(name)
            elif verdict == "failed":
                failed.append((name, reason))
            elif reason:
                stale.append(name)
        print(
            f"{selected}: {dict(totals[selected])} in {time.monotonic() - begin:.0f} s", flush=True
        )
        if args.report is not None:
            args.report.write_text(json.dumps(report, indent=1))
    print(f"\n{args.ranks} rank(s)" + " " * 34 + "passed  failed  not applicable")
    columns = ("passed", "failed", "not applicable")
    for selected, counts in [*totals.items(), ("total", sum(totals.values(), Counter()))]:
        print(f"{selected:<42}" + "".join(f"{counts[column]:>8}" for column in columns))
    print("\nnot applicable, by reason")
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):>5}  {reason.splitlines()[0] if reason else ''}")
    for name in stale:
        print(f"in EXCLUDED, but passes: {name}")
    for name, message in failed:
        print(f"FAILED {name}\n       " + "\n       ".join(message.splitlines()[:4]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
