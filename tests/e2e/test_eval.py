"""`redline eval`: the figures of a run's own evaluations, from its checkpoints, and those of any other model and task."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.processes import only_run, redline, rows, succeed, write_letters

from redline.models.files.sources import model_folder
from redline.telemetry import RunFolder

STEPS = 4
KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"evaluation": {"num_tasks": 8, "every": 2, "samples_per_task": 3}},
    "greedy": {"evaluation": {"num_tasks": 8, "every": 2, "temperature": 0.0}},
    "adapter": {"evaluation": {"num_tasks": 8, "every": 2, "samples_per_task": 2}},
}
SUMS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(12)]


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a run that has evaluated itself several times, and kept every checkpoint."""
    return train(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("one"), "sampled")


def train(cwd: Path, kind: str) -> Path:
    adapter = {"lora": {"rank": 4, "alpha": 32}} if kind == "adapter" else {}
    rate = {"sampled": 1e-3, "greedy": 3e-3, "adapter": 1e-2}[kind]
    run = {"steps": STEPS, "checkpoint_every": 2, "keep_checkpoints": 9, "seed": 3 if kind == "sampled" else 0}
    recipe = write_letters(cwd, run=run, rollouts=KINDS[kind], trainer={"learning_rate": rate, **adapter})
    succeed("train", recipe.name, cwd=cwd)
    return cwd


def evaluated(*arguments: str | Path, cwd: Path) -> dict[str, Any]:
    """The document that --json prints."""
    return json.loads(succeed("eval", *arguments, "--json", cwd=cwd).splitlines()[-1])


def logged(folder: RunFolder, step: int) -> dict[str, Any]:
    [row] = [row for row in rows(folder.evaluations) if row["step"] == step]
    return row


def assert_same(result: dict[str, Any], row: dict[str, Any]) -> None:
    """What `redline eval` says is what the run logged, question by question."""
    assert list(result["samples"].values()) == row["evaluation/task_scores"]
    for key in ("reward_mean", "num_tasks", "num_answers", "completion_tokens_mean", "truncated_fraction"):
        assert result[key] == row[f"evaluation/{key}"]


def test_a_checkpoint_has_the_figures_that_its_run_logged_at_that_step(trained: Path) -> None:
    folder = only_run(trained)
    seen = []
    for step in (2, STEPS):
        document = evaluated(f"runs/{folder.path.name}/checkpoints/step-{step:06d}", cwd=trained)
        [result] = document["results"]
        assert_same(result, logged(folder, step))
        seen.append(result["samples"])
    assert seen[0] != seen[1], "a test of one policy would show nothing"


def test_the_model_of_a_run_has_the_figures_of_its_last_evaluation_and_its_base_those_of_the_first(sampled: Path) -> None:
    folder = only_run(sampled)
    document = evaluated("runs/letters-001", "--against", "builtin:tiny", cwd=sampled)
    ours, theirs = document["results"]
    assert_same(ours, logged(folder, STEPS))
    assert_same(theirs, logged(folder, 0))
    [difference] = document["differences"]
    assert difference["value"] == pytest.approx(ours["value"] - theirs["value"])
    assert difference["num_tasks"] == 8
    low, high = difference["interval_95"]
    assert low < difference["value"] < high


def test_a_run_without_a_model_is_evaluated_at_its_newest_checkpoint(sampled: Path, tmp_path: Path) -> None:
    shutil.copytree(sampled, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(only_run(tmp_path).model)
    shutil.rmtree(only_run(tmp_path).checkpoints / f"step-{STEPS:06d}")
    [result] = evaluated("runs/letters-001", cwd=tmp_path)["results"]
    assert result["model"] == "runs/letters-001/checkpoints/step-000002"
    assert_same(result, logged(only_run(tmp_path), 2))


def test_a_recipe_asks_any_model_what_a_run_of_it_would_ask(sampled: Path) -> None:
    """A Hugging Face folder that no run has made."""
    document = evaluated(str(model_folder("builtin:tiny", seed=3)), "letters.yaml", cwd=sampled)
    assert_same(document["results"][0], logged(only_run(sampled), 0))


def test_a_file_of_questions_is_asked_whole_beside_other_tasks(sampled: Path) -> None:
    (sampled / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*SUMS, SUMS[0]]))
    arguments = ("builtin:tiny", "sums.jsonl", "letters.yaml", "num_tasks=10", "temperature=0", "rollouts.max_new_tokens=4")
    done = redline("eval", *arguments, "--save", "out", "--json", cwd=sampled)
    assert done.returncode == 0, done.stderr
    assert "1 row(s) ask what another row asks" in done.stderr
    sums, letters = json.loads(done.stdout)["results"]
    assert (sums["name"], sums["unit"], sums["num_tasks"]) == ("sums.jsonl", "accuracy", 10)
    assert sums["value"] == sums["interval_95"][0] == 0 < sums["interval_95"][1] < 0.5, (
        "none of ten is right, and that says something"
    )
    assert (letters["name"], letters["unit"], letters["num_tasks"]) == ("letters.yaml", "reward", 10)
    assert json.loads((sampled / "out" / "eval.json").read_text()) == json.loads(done.stdout)
    answers = rows(sampled / "out" / "answers.jsonl")
    assert len(answers) == sums["num_answers"] + letters["num_answers"] == 10 + 30
    assert {row["reference"] for row in answers if row["task"] == "sums.jsonl"} <= {row["answer"] for row in SUMS}
    assert all(row["tokens"] <= 4 for row in answers)
    assert evaluated("builtin:tiny", "sums.jsonl", cwd=sampled)["results"][0]["num_tasks"] == len(SUMS)


def test_a_table_goes_to_stdout_and_says_how_sure_it_is(sampled: Path) -> None:
    done = redline("eval", "runs/letters-001", "--against", "builtin:tiny", cwd=sampled)
    assert done.returncode == 0
    assert "95% interval" in done.stdout
    assert "runs/letters-001 less builtin:tiny is " in done.stdout
    assert "loading builtin:tiny" in done.stderr


def test_rows_that_a_run_was_trained_on_are_not_asked_of_it(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    task = {"task": {"kind": "file", "path": "sums.jsonl"}, "max_new_tokens": 2, "evaluation": {"num_tasks": 4}}
    recipe = write_letters(tmp_path, run={"steps": 1}, rollouts=task)
    succeed("train", recipe.name, cwd=tmp_path)
    for model in ("runs/letters-001", "runs/letters-001/model"):
        done = redline("eval", model, "./sums.jsonl", cwd=tmp_path)
        assert done.returncode == 2
        assert "was trained on its rows" in done.stderr
        assert f"hint: leave it out, which asks those that were held out: redline eval {model}" in done.stderr
    [held_out] = evaluated("runs/letters-001", cwd=tmp_path)["results"]
    assert held_out["num_tasks"] == 1
    shutil.copyfile(tmp_path / "sums.jsonl", tmp_path / "others.jsonl")
    [others] = evaluated("runs/letters-001", "others.jsonl", cwd=tmp_path)["results"]
    assert others["num_tasks"] == len(SUMS)
    assert others["config"]["rollouts"]["max_new_tokens"] == 2, "asked as the run asked"
    done = redline("train", "letters.yaml", "rollouts.task.held_out_fraction=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "every row is held out" in done.stderr


def test_a_damaged_checkpoint_and_one_of_another_model_are_refused(sampled: Path, tmp_path: Path) -> None:
    shutil.copytree(sampled, tmp_path, dirs_exist_ok=True)
    run = only_run(tmp_path)
    config = json.loads(run.config.read_text())
    config["model"]["path"] = "builtin:small"
    run.config.write_text(json.dumps(config))
    done = redline("eval", "runs/letters-001/checkpoints/step-000002", cwd=tmp_path)
    assert done.returncode == 2
    assert "the checkpoint is of another model" in done.stderr
    weights = run.checkpoints / "step-000002" / "trainer.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"\xff" * 8)
    done = redline("eval", "runs/letters-001/checkpoints/step-000002", cwd=tmp_path)
    assert done.returncode == 2
    assert "damaged checkpoint: trainer.safetensors has changed" in done.stderr
    assert "Traceback" not in done.stderr


def test_where_it_cannot_be_saved_is_said_before_anything_is_asked(sampled: Path) -> None:
    done = redline("eval", "builtin:tiny", "letters.yaml", "--save", "letters.py", cwd=sampled)
    assert done.returncode == 2
    assert "--save = 'letters.py'" in done.stderr
    assert "is a file, not a folder" in done.stderr
    assert "loading" not in done.stderr


def test_an_evaluation_in_which_everything_fails_is_an_error(tmp_path: Path) -> None:
    recipe = write_letters(tmp_path)
    (tmp_path / "letters.py").write_text((tmp_path / "letters.py").read_text().replace('if "q" in text', "if True"))
    done = redline("eval", "builtin:tiny", recipe.name, "--save", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert "every attempt of the evaluation failed (8 of 8)" in done.stderr
    assert not (tmp_path / "out").exists()


def test_questions_of_any_source_that_do_not_fit_are_left_out_with_a_line_and_not_counted_as_wrong(tmp_path: Path) -> None:
    recipe = write_letters(tmp_path, run={"steps": 1})
    letters, question = tmp_path / "letters.py", 'f"test {i}"'
    assert question in letters.read_text()
    letters.write_text(letters.read_text().replace(question, f"{question} * (3000 if i % 2 else 1)"))
    succeed("train", recipe.name, cwd=tmp_path)
    done = redline("eval", "runs/letters-001/checkpoints/step-000001", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [result] = json.loads(done.stdout)["results"]
    assert (result["num_tasks"], result["left_out"], result["failures"]) == (4, 4, 0)
    assert "left out of 8 held-out tasks: letters/held_out/1 (a prompt of " in done.stderr
    assert "and 3 more" in done.stderr
    assert_same(result, logged(only_run(tmp_path), 1))


def test_an_earlier_document_is_not_overwritten(sampled: Path) -> None:
    for name in ("eval.json", "answers.jsonl"):
        folder = sampled / f"earlier-{name}"
        folder.mkdir()
        (folder / name).write_text("kept")
        done = redline("eval", "builtin:tiny", "letters.yaml", "--save", folder.name, cwd=sampled)
        assert done.returncode == 2
        assert f"{folder.name}/{name} is there already, and is not overwritten" in done.stderr
        assert "hint: give another folder, or remove it" in done.stderr
        assert "loading" not in done.stderr
        assert [path.name for path in folder.iterdir()] == [name]
        assert (folder / name).read_text() == "kept"
