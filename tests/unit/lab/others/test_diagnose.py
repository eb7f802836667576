"""What the doctor says of runs of others, and what it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.other_logs import RECORDED, verl_row, write_prime, write_verl, write_verl_console
from typer.testing import CliRunner

from redline.cli import app
from redline.lab.doctor.doctor import RULES, Diagnosis
from redline.lab.doctor.finding import Finding
from redline.lab.others.advice import ADVICE
from redline.lab.others.diagnose import RULES_OF_OTHERS, diagnose
from redline.runs.others import OtherRun, open_run


def diagnosed(path: Path) -> Diagnosis:
    run = open_run(path)
    assert isinstance(run, OtherRun)
    return diagnose(run)


def found(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {finding.cause: finding for finding in diagnosis.findings}


def test_a_log_of_verl_is_diagnosed_with_verls_own_settings(tmp_path: Path) -> None:
    diagnosis = diagnosed(write_verl(tmp_path / "tiny.jsonl", 12))
    assert diagnosis.bound.headline == "Training bounds this run: 52% of a step."
    double = found(diagnosis)["double_forward"]
    assert diagnosis.share(double.gain.likely_s) == pytest.approx(0.9 * 0.12)
    assert "rollout_correction.bypass_mode" in double.advice
    assert double.change == {}
    assert "redline compare" not in "".join(finding.proof(diagnosis.run) for finding in diagnosis.findings)


def test_findings_come_by_recoverable_time(tmp_path: Path) -> None:
    gains = [finding.gain.likely_s for finding in diagnosed(write_verl(tmp_path / "tiny.jsonl", 12)).findings]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) >= 3


def test_a_healthy_run_gets_no_finding(tmp_path: Path) -> None:
    healthy = {"timing_s/reward": 0.1, "timing_s/old_log_prob": 0.1, "timing_s/update_weights": 0.5}
    healthy |= {
        "timing_s/gen": 50.0,
        "timing_s/update_actor": 48.0,
        "response_length/max": 300.0,
        "global_seqlen/balanced_max": 5001,
    }
    rows = [{"step": step, "data": verl_row(step) | healthy} for step in range(1, 13)]
    (tmp_path / "tiny.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    diagnosis = diagnosed(tmp_path / "tiny.jsonl")
    assert diagnosis.findings == ()
    assert diagnosis.verdict == "Nothing worth fixing."


def test_waits_of_both_sides_of_prime_rl_are_a_finding(tmp_path: Path) -> None:
    diagnosis = diagnosed(write_prime(tmp_path / "metrics.jsonl", 12))
    assert diagnosis.bound.headline == "Generation bounds this run: the trainer waits for it 40% of the time."
    waits = found(diagnosis)["staleness_waits"]
    assert diagnosis.share(waits.gain.likely_s) == pytest.approx(0.6 * 6 / 20, rel=0.01)
    assert "max_off_policy_steps" in waits.advice


def test_a_log_without_times_is_not_diagnosed_and_says_why(tmp_path: Path) -> None:
    state = json.loads((RECORDED / "trainer_state.json").read_text())
    for row in state["log_history"]:
        row.pop("step_time", None)
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    diagnosis = diagnosed(tmp_path / "trainer_state.json")
    assert diagnosis.findings == ()
    assert diagnosis.bound.headline == "The log of TRL does not say what the time of a step went to."
    assert diagnosis.verdict == "TRL writes that to W&B alone (report_to=wandb, WANDB_MODE=offline)."


def test_what_TRL_logged_to_wandb_is_diagnosed() -> None:
    diagnosis = diagnosed(RECORDED / "run-tiny.wandb")
    assert diagnosis.num_steps == 14
    assert " bounds this run: " in diagnosis.bound.headline
    assert all(finding.advice for finding in diagnosis.findings)


@pytest.mark.parametrize("name", ["trainer_state.json", "events.out.tfevents.tiny", "run-tiny.wandb"])
def test_every_cause_is_found_excluded_or_said_to_be_out_of_reach(name: str) -> None:
    diagnosis = diagnosed(RECORDED / name)
    untold = {abstention.cause for abstention in diagnosis.abstentions}
    assert set(RULES) - set(RULES_OF_OTHERS) <= untold
    assert not untold & set(found(diagnosis))


def test_advice_is_given_for_causes_that_exist() -> None:
    assert all(set(own) <= set(RULES_OF_OTHERS) for own in ADVICE.values())


def test_the_doctor_and_the_report_take_a_log_of_others(tmp_path: Path) -> None:
    log = write_verl(tmp_path / "tiny.jsonl", 12)
    said = CliRunner().invoke(app, ["doctor", str(log)]).stdout
    assert said.startswith("Training bounds this run: 52% of a step.\n")
    assert "What the recording cannot tell:" in said
    assert "low_concurrency, prefix_cache_off, preemption" in said
    page = CliRunner().invoke(app, ["report", str(log)]).stdout.strip()
    assert Path(page) == tmp_path / "report.html"
    assert "a log of verl (JSON: tiny.jsonl), 12 steps" in Path(page).read_text()
    head = json.loads(CliRunner().invoke(app, ["report", str(log), "--json", "--price", "2"]).stdout)
    assert head["status"] == "log"
    assert head["doctor"]["cost"]["money"] == pytest.approx(12 * 100 / 3600 * 2)
    assert head["train_s"] == pytest.approx(1200)


def test_every_log_makes_a_page_without_a_claim_that_it_cannot_support(tmp_path: Path) -> None:
    for name in ("trainer_state.json", "events.out.tfevents.tiny", "run-tiny.wandb"):
        page = tmp_path / f"{name}.html"
        made = CliRunner().invoke(app, ["report", str(RECORDED / name), "-o", str(page), "--price", "2", "--target", "0.6"])
        assert made.exception is None
        assert "It is not clear that it learned: held-out reward went from" in page.read_text()
        assert "0 answers" not in page.read_text()


def test_what_is_no_log_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing\n")
    for verb in ("doctor", "report"):
        refused = CliRunner().invoke(app, [verb, str(tmp_path / "notes.txt")])
        assert "not a log of TRL, verl or prime-rl" in str(refused.exception)


def test_a_log_that_is_cut_is_said_to_be_cut(tmp_path: Path) -> None:
    path = write_verl_console(tmp_path / "console.log")
    path.write_text(path.read_text() + "step:11 - timing_s/step:1")
    assert diagnosed(path).bound.details[-1] == "console.log: its last line is cut short and left out."
