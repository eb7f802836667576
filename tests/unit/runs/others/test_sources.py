"""Which files are the log of one run, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.other_logs import RECORDED, write_prime, write_verl
from support.run_folders import write_run
from tensorboardX import SummaryWriter

from redline.errors import RunFolderError
from redline.runs.others import OtherRun, open_run


def test_a_run_of_ours_is_a_run_of_ours_whatever_its_sinks_left_there(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3)
    with SummaryWriter(str(folder.path / "tensorboard")) as writer:
        writer.add_scalar("timing_s/gen", 1.0, 1)
    assert not isinstance(open_run(folder.path), OtherRun)


def test_the_output_folder_of_TRL_is_read_from_its_newest_checkpoint(tmp_path: Path) -> None:
    history = json.loads((RECORDED / "trainer_state.json").read_text())
    for steps in (8, 16):
        checkpoint = tmp_path / f"checkpoint-{steps}"
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
        rows = [row for row in history["log_history"] if row["step"] <= steps]
        (checkpoint / "trainer_state.json").write_text(json.dumps(history | {"log_history": rows}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert open_run(tmp_path).steps == 16
    assert open_run(tmp_path / "checkpoint-8").steps == 8


def test_where_a_run_was_logged_in_several_ways_the_one_that_holds_most_is_read(tmp_path: Path) -> None:
    for name in ("trainer_state.json", "events.out.tfevents.tiny", "run-tiny.wandb"):
        shutil.copy(RECORDED / name, tmp_path / name)
    run = open_run(tmp_path)
    assert isinstance(run, OtherRun)
    assert [log.path.name for log in run.logs] == ["run-tiny.wandb"]


def test_trainer_and_orchestrator_of_prime_rl_may_have_files_of_their_own(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in write_prime(tmp_path / "metrics.jsonl").read_text().splitlines()]
    both = list(open_run(tmp_path / "metrics.jsonl").rows("metrics"))
    for name, is_orchestrator in (("trainer", False), ("orchestrator", True)):
        (tmp_path / "apart" / name).mkdir(parents=True)
        own = [
            row for row in rows if ("progress/tasks" in row or "eval/gsm8k/effective/solver/avg@4" in row) == is_orchestrator
        ]
        (tmp_path / "apart" / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    apart = list(open_run(tmp_path / "apart").rows("metrics"))
    assert [dict(sorted(row.items())) for row in apart] == [dict(sorted(row.items())) for row in both]


def test_logs_of_two_frameworks_are_refused_by_name(tmp_path: Path) -> None:
    write_verl(tmp_path / "a.jsonl")
    write_prime(tmp_path / "metrics.jsonl")
    with pytest.raises(RunFolderError, match="several frameworks") as refused:
        open_run(tmp_path)
    assert "verl: " in refused.value.hint
    assert "prime-rl: " in refused.value.hint


def test_two_runs_of_a_framework_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_verl(tmp_path / name)
    with pytest.raises(RunFolderError, match="2 runs of verl") as refused:
        open_run(tmp_path)
    assert "a.jsonl" in refused.value.hint


def test_a_log_of_nobody_that_we_know_is_refused_with_what_it_has(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("val/accuracy", 1.0, 1)
    with pytest.raises(RunFolderError, match="not a log of TRL, verl or prime-rl: it has val/accuracy"):
        open_run(tmp_path)


def test_the_log_of_a_run_of_ours_is_refused_with_its_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3)
    with pytest.raises(RunFolderError, match="a run of ours") as refused:
        open_run(folder.metrics)
    assert refused.value.hint == f"give the folder: {folder.path}"


def test_figures_that_no_float_holds_are_left_out(tmp_path: Path) -> None:
    path = write_verl(tmp_path / "tiny.jsonl", 3)
    with path.open("a") as file:
        file.write('{"step": 4, "data": {"critic/score/mean": NaN, "actor/lr": 1%s, "actor/grad_norm": 0.5}}\n' % ("0" * 400))
        file.write("[" * 100_000 + "\n")
    run = open_run(path)
    [*_, last] = run.rows("metrics")
    assert last == {"step": 4, "trainer/grad_norm": 0.5}
    assert run.left_out()[0] == "tiny.jsonl: 1 of its lines are no JSON and left out."


def test_supervised_training_of_transformers_is_no_run(tmp_path: Path) -> None:
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": [{"step": 1, "loss": 2.0, "learning_rate": 1e-5}]}))
    with pytest.raises(RunFolderError, match="not a log of TRL"):
        open_run(state)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("trainer_state.json", b"{", "damaged"),
        ("trainer_state.json", b"[]", "no log_history"),
        ("run-x.wandb", b"not W&B's", "not a W&B file"),
        ("events.out.tfevents.1", b"", "no figure could be read"),
        ("events.out.tfevents.1", b"\0" * 40, "no figure could be read"),
        ("verl.jsonl", b"\xff\xfe\n{}\n", "no figure could be read"),
        ("notes.txt", b"nothing of interest\n", "no figure could be read"),
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunFolderError, match=reason):
        open_run(tmp_path / name)


def test_an_empty_folder_and_one_that_is_not_there_are_refused_as_ever(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunFolderError, match=r"run folder"):
            open_run(path)


def test_lines_that_are_no_json_are_counted_and_a_last_one_that_is_cut_is_named(tmp_path: Path) -> None:
    path = write_verl(tmp_path / "tiny.jsonl", 6)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "garbage\n", *lines[3:-1], lines[-1][:50]]))
    run = open_run(path)
    assert run.steps == 5
    assert run.left_out()[0] == "tiny.jsonl: 1 of its lines are no JSON and left out; its last line is cut short."


def test_a_printed_line_that_is_cut_inside_a_number_is_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_text("step:1 - timing_s/step:100.0\nstep:2 - timing_s/step:100.0\nstep:3 - timing_s/step:1")
    run = open_run(path)
    assert [row["run/step_s"] for row in run.rows("metrics")] == [100.0, 100.0]
    assert run.left_out()[0] == "console.log: its last line is cut short and left out."
