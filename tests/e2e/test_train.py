from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from support.paths import ROOT
from support.processes import assert_finite, only_run, redline, rows, succeed, write_letters
from transformers import AutoModelForCausalLM, AutoTokenizer

from redline.config import load_recipe
from redline.models.files.sources import model_folder
from redline.telemetry import RunFolder

STEPS = 40


@dataclass
class Finished:
    cwd: Path
    folder: RunFolder
    stdout: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One run to the end, for every test that looks at what it left."""
    cwd = tmp_path_factory.mktemp("train")
    recipe = write_letters(cwd, run={"name": "letters", "num_threads": 1, "steps": STEPS, "checkpoint_every": 15})
    stdout = succeed("train", recipe.name, "--json", cwd=cwd)
    return Finished(cwd, only_run(cwd), stdout)


# ── it learns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_reward_rises_from_chance_to_nearly_all(finished: Finished) -> None:
    rewards = [row["rollouts/reward_mean"] for row in rows(finished.folder.metrics)]
    assert np.mean(rewards[:5]) < 0.1
    assert np.mean(rewards[-5:]) > 0.6


def test_held_out_tasks_are_answered_before_and_after_and_better_after(finished: Finished) -> None:
    before, after = rows(finished.folder.evaluations)
    assert (before["step"], after["step"]) == (0, STEPS)
    assert before["evaluation/reward_mean"] < 0.1
    assert after["evaluation/reward_mean"] > 0.6
    for row in (before, after):
        assert row["evaluation/num_tasks"] == row["evaluation/num_answers"] == 8
        assert len(row["evaluation/samples"]) == 3
        assert {sample["prompt"] for sample in row["evaluation/samples"]} == {"test 0", "test 1", "test 2"}


def test_transformers_loads_the_trained_model_and_it_says_what_it_learnt(finished: Finished) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished.folder.model)
    tokenizer = AutoTokenizer.from_pretrained(finished.folder.model)
    messages = [{"role": "user", "content": "word 3"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    text = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text.count("e") > 12


def test_the_saved_model_is_the_last_checkpoint(finished: Finished) -> None:
    model = load_file(finished.folder.model / "model.safetensors")
    state = load_file(finished.folder.checkpoints / f"step-{STEPS:06d}" / "trainer.safetensors")
    assert torch.equal(model["model.embed_tokens.weight"], state["master/embed"])
    assert torch.equal(model["model.norm.weight"], state["master/norm"])


# ── the run folder ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_metrics_have_one_finite_row_per_step(finished: Finished) -> None:
    found = rows(finished.folder.metrics)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for row in found:
        assert_finite(row)
        assert _always(row) == _always(found[0])


def _always(row: dict[str, Any]) -> set[str]:
    """What a row has whether or not attempts failed."""
    return {name for name in row if not name.startswith("rollouts/failures_")}


def test_metrics_say_what_happened(finished: Finished) -> None:
    with_signal = 0
    for row in rows(finished.folder.metrics):
        assert row["rollouts/groups"] == 4
        assert row["rollouts/completion_tokens_mean"] * 32 == pytest.approx(row["engine/new_tokens"])
        assert row["buffer/policy_lag_steps"] == 0
        assert row["weight_sync/bytes_moved"] == 0
        assert row["trainer/learning_rate"] == 3e-3
        assert row["trainer/trained_tokens"] <= row["engine/new_tokens"]
        assert (row["trainer/trained_tokens"] > 0) == (row["rollouts/groups_with_signal"] > 0)
        if row["trainer/trained_tokens"]:
            assert row["trainer/clip_fraction"] == 0, "on policy every ratio is 1"
            assert abs(row["trainer/mismatch_kl"]) < 1e-6
            assert row["trainer/max_ratio"] == pytest.approx(1, abs=1e-3)
            assert row["trainer/entropy"] > 0
            assert row["trainer/grad_norm"] > 0
            with_signal += 1
        else:
            assert row["trainer/entropy"] is None, "no token, no mean"
    assert with_signal > STEPS / 2


def test_the_seconds_of_a_step_add_up(finished: Finished) -> None:
    for row in rows(finished.folder.metrics):
        parts = sum(value for key, value in row.items() if key.startswith("time/"))
        assert parts == pytest.approx(row["run/step_s"], rel=1e-9)


def test_the_ledger_accounts_for_every_nanosecond(finished: Finished) -> None:
    lanes = json.loads(finished.folder.ledger.read_text())["lanes"]
    for lane in lanes.values():
        assert sum(lane["rows"].values()) + lane["unaccounted_ns"] == lane["wall_ns"]
        assert all(ns >= 0 for ns in lane["rows"].values())
    main = lanes["main"]
    assert main["unaccounted_ns"] < 0.3 * main["wall_ns"]
    sections = {name.partition(".")[0] for name in main["rows"]}
    assert sections >= {"run", "models", "rollouts", "engine", "buffer", "trainer", "weight_sync", "telemetry"}


def test_the_trace_is_json_and_agrees_with_the_ledger(finished: Finished) -> None:
    """Two roads to the same sum: spans written one by one, and the recorder's running totals."""
    events = json.loads(finished.folder.trace.read_text())
    microseconds: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X":
            microseconds[event["name"]] += event["dur"]
    main = json.loads(finished.folder.ledger.read_text())["lanes"]["main"]["rows"]
    for leaf in ("engine.prefill", "engine.decode", "trainer.pack", "trainer.backward", "trainer.optimizer", "models.load"):
        assert microseconds[leaf] * 1000 == pytest.approx(main[leaf], rel=1e-6), leaf


def test_trajectories_hold_every_attempt_of_every_step(finished: Finished) -> None:
    paths = sorted(finished.folder.trajectories.glob("*.arrow"))
    everything = [attempt for path in paths for attempt in pa.ipc.open_file(path).read_all().to_pylist()]
    failures = 0
    for version, row in enumerate(rows(finished.folder.metrics)):
        attempts = [attempt for attempt in everything if attempt["version"] == version]
        assert len(attempts) == 32
        scored = [a["reward"] for a in attempts if a["failure"] is None]
        assert np.mean(scored) == pytest.approx(row["rollouts/reward_mean"], abs=1e-6)
        assert sum(sum(a["loss_mask"]) for a in attempts) == row["engine/new_tokens"]
        assert sum(a["failure"] is not None for a in attempts) == row["rollouts/failures"]
        failures += row["rollouts/failures"]
        for attempt in attempts:
            if attempt["failure"] is None:
                assert attempt["reward"] == pytest.approx(attempt["text"].count("e") / max(1, len(attempt["text"])))
            else:
                assert attempt["failure"].startswith("reward: ValueError: there is a q in it, at letters.py:")
                assert attempt["advantage"] == 0
    assert failures > 0, "the reward never raised, so that nothing was shown"


def test_the_config_in_the_folder_is_the_run_and_nothing_in_it_is_open(finished: Finished) -> None:
    config = load_recipe(finished.folder.config)
    assert config.run.steps == STEPS
    assert config.run.device in ("cpu", "cuda")
    assert config.model.dtype == "float32"
    assert config.run.num_threads == 1


def test_the_environment_says_what_the_numbers_depend_on(finished: Finished) -> None:
    environment = json.loads(finished.folder.environment.read_text())
    installed, imported = environment["packages"]["torch"], torch.__version__
    assert installed.partition("+")[0] == imported.partition("+")[0], "what is behind + only one of the two may say"
    assert environment["command"][:2] == ["redline", "train"]


def test_only_the_last_two_checkpoints_are_left(finished: Finished) -> None:
    assert sorted(path.name for path in finished.folder.checkpoints.iterdir()) == ["step-000030", f"step-{STEPS:06d}"]


# ── the command line ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_json_is_the_last_line_and_one_document(finished: Finished) -> None:
    document = json.loads(finished.stdout.splitlines()[-1])
    assert document["run"] == str(finished.folder.path.relative_to(finished.cwd))
    assert document["steps"] == STEPS
    assert document["finished"] is True
    assert (finished.cwd / document["model"] / "config.json").is_file()
    assert document["evaluation"] == {
        str(row["step"]): row["evaluation/reward_mean"] for row in rows(finished.folder.evaluations)
    }
    assert 0 <= document["unaccounted_fraction"] < 0.3
    assert finished.stdout.count("\n") == 1, "stdout is for data alone"


@pytest.mark.parametrize(
    "mistake", ["run.stepz=7", "trainer.kl_in=reward", "rollouts.reward_model.path=/nowhere", "run.folder=letters.yaml"]
)
def test_a_dry_run_says_what_is_wrong_with_a_recipe_before_it_loads_torch(tmp_path: Path, mistake: str) -> None:
    recipe = write_letters(tmp_path)
    for name in ("torch", "transformers"):
        (tmp_path / "poison" / name).mkdir(parents=True)
        (tmp_path / "poison" / name / "__init__.py").write_text("raise SystemExit('loaded by a dry run')")
    paths = [str(tmp_path / "poison"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = redline("train", recipe.name, mistake, "--dry-run", cwd=tmp_path, env={"PYTHONPATH": os.pathsep.join(paths)})
    assert done.returncode == 2
    assert mistake.partition("=")[0] in done.stderr
    assert "\n\nhint: " in done.stderr


def test_a_dry_run_prints_the_whole_config_and_leaves_nothing(tmp_path: Path) -> None:
    recipe = write_letters(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    stdout = succeed("train", recipe.name, "run.steps=7", "--dry-run", cwd=tmp_path, env={"PYTHONDONTWRITEBYTECODE": "1"})
    printed = json.loads(stdout)
    assert printed["run"]["steps"] == 7
    assert printed["model"]["dtype"] == "float32"
    assert isinstance(printed["run"]["num_threads"], int)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_says_what_would_run_where(tmp_path: Path) -> None:
    recipe = write_letters(tmp_path, run={"device": "cpu"})
    done = redline("train", recipe.name, "buffer.max_lag=1", "--dry-run", cwd=tmp_path)
    assert "placement: rollouts, engine: process 0, thread rollouts (cpu, 1 CPU thread); buffer, trainer" in done.stderr


def test_a_dry_run_finds_what_is_wrong_with_the_task_source(tmp_path: Path) -> None:
    write_letters(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from letters import Letters\n\nclass Mine(Letters):\n    def train(self, index):\n        return {}\n"
    )
    done = redline("train", "letters.yaml", "rollouts.task.path=mine:Mine", "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "train(0) gave a dict, not a Task" in done.stderr
    assert "Traceback" not in done.stderr


BAD_COMMANDS: dict[str, tuple[list[str], str]] = {
    "unknown key": (["letters.yaml", "trainer.learning_rat=1"], "did you mean trainer.learning_rate?"),
    "unknown section": (["letters.yaml", "trainr.eps=1"], "did you mean trainer?"),
    "wrong value": (["letters.yaml", "run.steps=0"], "run.steps"),
    "wrong type": (["letters.yaml", "run.steps=many"], "run.steps"),
    "lag below zero": (["letters.yaml", "buffer.max_lag=-1"], "buffer.max_lag"),
    "no such recipe": (["leters.yaml"], "did you mean letters.yaml?"),
    "not an override": (["letters.yaml", "faster"], "for example run.steps=20"),
    "no such model": (["letters.yaml", "model.path=/no/such/folder"], "Hugging Face folder"),
    "no such built-in model": (["letters.yaml", "model.path=builtin:huge"], "builtin:tiny"),
    "group that does not fit": (["letters.yaml", "engine.max_num_seqs=4"], "engine.max_num_seqs"),
    "no run to continue": (["letters.yaml", "--resume"], "without --resume"),
    "no such run folder": (["runs/letters-007", "--resume"], "run"),
}


@pytest.mark.parametrize(("arguments", "hint"), BAD_COMMANDS.values(), ids=BAD_COMMANDS.keys())
def test_a_mistake_ends_with_code_2_the_reason_and_a_hint_and_leaves_nothing(
    arguments: list[str], hint: str, tmp_path: Path
) -> None:
    write_letters(tmp_path)
    done = redline("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert hint in done.stderr.partition("\n\nhint: ")[2]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollouts.task.path=leters:Letters", "no module 'leters'"),
        ("rollouts.task.params={lettre: e}", "lettre"),
    ],
)
def test_a_task_that_cannot_be_made_ends_with_code_2_and_a_hint(override: str, message: str, tmp_path: Path) -> None:
    write_letters(tmp_path)
    done = redline("train", "letters.yaml", override, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "\n\nhint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_smoke_recipe_runs(tmp_path: Path) -> None:
    stdout = succeed("train", ROOT / "recipes" / "smoke.yaml", "run.steps=2", "rollouts.evaluation.num_tasks=2", cwd=tmp_path)
    folder = only_run(tmp_path)
    assert stdout == f"{folder.path.relative_to(tmp_path)}\n"
    assert [row["step"] for row in rows(folder.metrics)] == [1, 2]


@pytest.mark.slow
def test_a_run_that_never_moved_its_weights_says_so_and_why_also_once_it_was_resumed(tmp_path: Path) -> None:
    write_letters(tmp_path, run={"name": "letters", "num_threads": 1, "steps": 1})
    flat = "from letters import Letters\n\nclass Flat(Letters):\n    def score(self, task, text):\n        return {'e': 7.5}\n"
    (tmp_path / "flat.py").write_text(flat)
    first = redline("train", "letters.yaml", "rollouts.task.path=flat:Flat", "--json", cwd=tmp_path)
    again = redline("train", "runs/letters-001", "run.steps=2", "--resume", "--json", cwd=tmp_path)
    folder = only_run(tmp_path)
    why = "in every group all attempts scored alike (mean reward 7.500), and "
    for done in (first, again):
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["why_not"].startswith(why)
        assert f"nothing was learned: {document['why_not']}\n" in done.stderr
        assert "the budget: a reply has at most rollouts.max_new_tokens = " in done.stderr
        assert "trained model" not in done.stderr
        assert document["weights_changed"] is False
    assert "reward  7.500  8 answers" in first.stderr
    assert "accuracy" not in first.stderr
    assert document["accuracy"] == {}
    before = load_file(model_folder("builtin:tiny") / "model.safetensors")
    after = load_file(folder.model / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.slow
@pytest.mark.alone
def test_the_smoke_recipe_takes_about_half_a_minute(tmp_path: Path) -> None:
    document: dict[str, Any] = json.loads(succeed("train", ROOT / "recipes" / "smoke.yaml", "--json", cwd=tmp_path))
    assert document["finished"]
    assert document["wall_s"] < 90
    assert document["unaccounted_fraction"] < 0.02
    assert all(math.isfinite(value) for value in document["evaluation"].values())


# ── a target ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_ends_with_its_model_when_the_held_out_reward_reaches_the_target(tmp_path: Path) -> None:
    evaluation = {"num_tasks": 2, "every": 2, "stop_at": -1.0}
    recipe = write_letters(
        tmp_path,
        run={"num_threads": 1, "steps": 9, "checkpoint_every": 0},
        rollouts={"evaluation": evaluation, "answer_prefix": "So, "},
    )
    document = json.loads(succeed("train", recipe.name, "--json", cwd=tmp_path).splitlines()[-1])
    folder = only_run(tmp_path)
    assert (document["steps"], document["finished"]) == (2, True)
    before, after = rows(folder.evaluations)
    assert (before["step"], after["step"]) == (0, 2), "the one before the first step does not end it"
    assert all(sample["answer"].startswith("So, ") for sample in after["evaluation/samples"])
    assert (folder.model / "model.safetensors").exists()
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000002"]
    again = json.loads(succeed("train", folder.path, "--resume", "--json", cwd=tmp_path).splitlines()[-1])
    assert (again["steps"], again["finished"]) == (2, True)


def test_a_target_that_nothing_measures_is_refused(tmp_path: Path) -> None:
    recipe = write_letters(tmp_path, rollouts={"evaluation": {"num_tasks": 2, "stop_at": 0.5}})
    refused = redline("train", recipe.name, "--dry-run", cwd=tmp_path)
    assert refused.returncode == 2
    assert "stop_at = 0.5: nothing is evaluated on the way" in refused.stderr
