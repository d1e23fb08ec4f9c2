"""What a tuner tries and how it judges, on made-up measurements with known answers."""

import json
import math
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_mcore import ConfigurationError
from lightning_mcore.tuning.report import as_dict, as_text, as_yaml, save_report
from lightning_mcore.tuning.trials import (
    SWITCHES,
    Measurement,
    Refusal,
    Trial,
    combine,
    plan_trials,
)
from lightning_mcore.tuning.verdict import judge, strategy_call

KNOWN = {name for change in SWITCHES for name in change} | {"tp", "pp", "vpp", "comm"}


def trial(name, **change):
    return Trial(name=name, arguments={"comm": "safe", **change}, change=change)


def measured(name, step_s, losses=(3.0, 2.0), norms=(1.0, 0.5), again=None, **change):
    return Measurement(
        trial=trial(name, **change),
        step_s=step_s,
        losses=[losses, *(again or [losses] * (len(step_s) - 1))],
        grad_norms=[norms] * len(step_s),
        peak_bytes=2**30,
    )


SAFE = measured("safe", [1.0, 2.0, 1.0])


def report_of(*others, base=SAFE, precision="32-true", **options):
    return judge([base, *others], [], precision=precision, setting={}, **options)


class TestTrials:
    def test_sizes_stay_and_switches_go(self):
        asked = {"tp": 2, "micro_batch_size": 4, "overlap_grad_reduce": "auto", "comm": "auto"}
        trials = {found.name: found for found in plan_trials(asked, KNOWN)}
        base = {"tp": 2, "micro_batch_size": 4, "comm": "safe"}
        assert trials["safe"].arguments == base
        assert trials["overlap_p2p"].arguments == base | {"overlap_p2p": True}
        assert trials["comm=max"].arguments == base | {"comm": "max"}
        assert trials["moe_dispatcher=deepep"].change == {"moe_dispatcher": "deepep"}

    def test_a_gather_brings_what_it_needs(self):
        trials = {found.name: found for found in plan_trials({}, KNOWN)}
        assert trials["overlap_param_gather"].change == {
            "overlap_param_gather": True,
            "overlap_grad_reduce": True,
            "use_distributed_optimizer": True,
        }

    def test_what_needs_a_switch_is_not_in_the_baseline(self):
        asked = {"ep": 2, "overlap_moe": "1f1b", "delay_wgrad_compute": True}
        trials = {found.name: found for found in plan_trials(asked, KNOWN | {"ep"})}
        assert trials["safe"].arguments == {"ep": 2, "comm": "safe"}
        assert trials["as configured"].arguments == asked

    def test_only_switches_that_the_strategy_has(self):
        names = [found.name for found in plan_trials({}, {"comm", "overlap_p2p"})]
        assert names == ["safe", "overlap_p2p", "comm=auto", "comm=max"]

    def test_the_users_own_choice_is_a_trial(self):
        asked = {"tp": 2, "overlap_grad_reduce": True}
        (own,) = [t for t in plan_trials(asked, KNOWN) if t.name == "as configured"]
        assert own.arguments == asked

    @pytest.mark.parametrize("extra", [{"x": {"wings": 2}}, {"x": {}}, {"safe": {"tp": 2}}])
    def test_wrong_extra_trials(self, extra):
        with pytest.raises(ConfigurationError, match="Trial '"):
            plan_trials({}, KNOWN, extra)

    def test_winners_together(self):
        one, two = trial("a", overlap_p2p=True), trial("b", overlap_grad_reduce=True)
        together = combine(trial("safe"), [one, two])
        assert together.arguments == {
            "comm": "safe",
            "overlap_p2p": True,
            "overlap_grad_reduce": True,
        }

    def test_the_faster_winner_keeps_a_switch(self):
        one, two = (
            trial("a", overlap_moe="1f1b"),
            trial("b", overlap_moe="shared", overlap_p2p=True),
        )
        assert combine(trial("safe"), [one, two]).change["overlap_moe"] == "1f1b"

    def test_nothing_to_combine(self):
        one = trial("a", overlap_p2p=True)
        wide = trial("b", overlap_p2p=True, overlap_grad_reduce=True)
        assert combine(trial("safe"), []) is None
        assert combine(trial("safe"), [one]) is None
        assert combine(trial("safe"), [one, wide]) is None
        assert combine(trial("safe"), [trial("comm=max", comm="max")]) is None


class TestVerdict:
    def test_ratios_are_taken_round_by_round(self):
        row = report_of(measured("fast", [0.8, 1.6, 0.9])).rows[1]
        assert (row.ratio, row.spread) == (pytest.approx(0.8), (pytest.approx(0.8), 0.9))
        assert row.wins

    def test_faster_must_be_so_in_every_round(self):
        report = report_of(measured("lucky", [0.5, 1.0, 1.01]))
        assert not report.rows[1].wins
        assert report.recommended is report.baseline

    def test_a_gain_within_the_noise_is_none(self):
        report = report_of(measured("even", [0.995, 1.99, 0.995]))
        assert report.recommended is report.baseline
        assert any(
            line.startswith("even") and "no clear gain" in line
            for line in as_text(report).splitlines()
        )

    def test_the_fastest_of_the_same_training(self):
        report = report_of(
            measured("good", [0.9, 1.8, 0.9]),
            measured("better", [0.8, 1.6, 0.8]),
            measured("wrong", [0.1, 0.2, 0.1], losses=(3.0, 2.1)),
        )
        assert report.recommended.name == "better"
        assert [row.name for row in report.winners] == ["better", "good"]

    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    def test_numbers_gone_bad_are_never_the_same(self, broken):
        for change in ({"losses": (3.0, broken)}, {"norms": (1.0, broken)}):
            row = report_of(measured("bad", [0.1] * 3, **change)).rows[1]
            assert not row.parity.holds
        base = measured("safe", [1.0] * 3, losses=(3.0, broken))
        assert not report_of(base=base).baseline.parity.holds
        assert report_of(measured("x", [0.1] * 3, losses=(3.0, broken)), base=base).winners == []

    def test_a_lost_step_is_no_parity(self):
        assert not report_of(measured("short", [0.5] * 3, losses=(3.0,))).rows[1].parity.holds

    def test_a_change_in_a_later_round_counts(self):
        later = measured("late", [0.5] * 3, again=[(3.0, 2.0), (3.0, 2.001)])
        assert not report_of(later).rows[1].parity.holds

    def test_a_wrong_gradient_behind_the_same_loss(self):
        # The loss of the first steps hardly shows gradients that are twice too large.
        assert not report_of(measured("double", [0.5] * 3, norms=(2.0, 1.0))).rows[1].parity.holds

    def test_tolerance_follows_the_baselines_repeats(self):
        noisy = measured("safe", [1.0] * 3, again=[(3.0, 2.0), (3.0, 2.002)])
        row = report_of(measured("x", [0.5] * 3, losses=(3.0, 2.005)), base=noisy).rows[1]
        assert row.parity.loss_tolerance == pytest.approx(3 * 0.002 / 2.002)
        assert row.parity.holds
        wider = report_of(measured("x", [0.5] * 3, losses=(3.0, 2.008)), base=noisy).rows[1]
        assert not wider.parity.holds

    @pytest.mark.parametrize(
        ("precision", "same", "different"),
        [("32-true", 1 + 0.9e-5, 1 + 1.1e-5), ("bf16-mixed", 1.019, 1.021)],
    )
    def test_floors(self, precision, same, different):
        for factor, holds in ((same, True), (different, False)):
            found = measured("x", [0.5] * 3, losses=(3.0, 2.0 * factor))
            assert report_of(found, precision=precision).rows[1].parity.holds is holds

    def test_later_trials_are_compared_with_their_own_baseline(self):
        report = report_of(measured("late", [4.0, 4.0, 4.0]), baselines={"late": [5.0, 5.0, 5.0]})
        assert report.rows[1].ratio == pytest.approx(0.8)

    @given(st.lists(st.floats(0.01, 100), min_size=3, max_size=3), st.floats(1e-4, 1e4))
    def test_the_unit_of_time_does_not_matter(self, times, unit):
        base = measured("safe", [1.0 * unit, 2.0 * unit, 3.0 * unit])
        plain = report_of(measured("x", times), base=measured("safe", [1.0, 2.0, 3.0]))
        scaled = report_of(measured("x", [time * unit for time in times]), base=base)
        assert scaled.rows[1].ratio == pytest.approx(plain.rows[1].ratio)


class TestReport:
    report = judge(
        [
            SAFE,
            measured("overlap_p2p", [0.5, 1.0, 0.5], overlap_p2p=True),
            measured("<b>", [0.1] * 3, losses=(9.0, 9.0)),
        ],
        [Refusal(trial=trial("deepep"), reason="`moe_dispatcher` needs deep_ep")],
        precision="32-true",
        setting={"torch": "2.13"},
    )

    def test_text(self):
        text = as_text(self.report)
        lines = text.splitlines()
        assert any(line.startswith("overlap_p2p") and "recommended" in line for line in lines)
        assert any(line.startswith("<b>") and "CHANGES TRAINING" in line for line in lines)
        assert "refused  deepep: `moe_dispatcher` needs deep_ep" in lines
        assert "100.0 % more steps" in text
        assert "Never use <b>" in text
        assert lines[-1] == "MCoreStrategy(comm='safe', overlap_p2p=True)"

    def test_yaml_is_what_the_cli_reads(self):
        strategy = yaml.safe_load(as_yaml(self.report))["trainer"]["strategy"]
        assert strategy["class_path"] == "lightning_mcore.MCoreStrategy"
        assert strategy["init_args"] == {"comm": "safe", "overlap_p2p": True}

    def test_machines_get_everything(self):
        found = json.loads(json.dumps(as_dict(self.report)))
        assert found["recommended"] == "overlap_p2p"
        assert [row["same_training"] for row in found["trials"]] == [True, True, False]
        assert found["trials"][1]["step_s"] == [0.5, 1.0, 0.5]

    @pytest.mark.parametrize("pictures", [True, False])
    def test_page(self, tmp_path, monkeypatch, pictures):
        if not pictures:
            monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        paths = save_report(self.report, tmp_path / "new")
        page = paths["html"].read_text()
        assert "&lt;b&gt;" in page
        assert "<b>&lt;b&gt;" not in page
        assert ("data:image/png;base64," in page) is pictures
        assert ("need matplotlib" in page) is not pictures
        assert "deep_ep" in page
        assert strategy_call(self.report.recommended.measured.trial)[:14] in page

    def test_what_is_left_to_the_strategy_is_not_shown(self):
        arguments = {"tp": 2, "vpp": None, "batch_p2p": "auto", "ddp": {}, "comm": "safe"}
        call = strategy_call(Trial(name="x", arguments=arguments))
        assert call == "MCoreStrategy(tp=2, comm='safe')"
        auto = strategy_call(Trial(name="x", arguments={"tp": 2, "comm": "auto"}))
        assert auto == "MCoreStrategy(tp=2)", "the default"

    def test_nothing_was_faster(self):
        report = report_of(measured("x", [1.5, 3.0, 1.5]))
        assert "keep safe" in as_text(report)
        assert report.recommended is report.baseline
