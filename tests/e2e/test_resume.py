"""A run that is killed at any moment and resumed is the run that was never killed: bit for bit, on the CPU."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.processes import (
    LETTERS,
    TIMEOUT_S,
    digest,
    num_rows,
    only_run,
    redline,
    rows,
    started,
    succeed,
    wait_for_run,
    wait_until,
    without_times,
    write_letters,
)
from support.stored_groups import without_seconds
from transformers import LlamaConfig, LlamaForCausalLM

from redline.config.resolve import bfloat16_flags
from redline.models.files.tiny import tiny_tokenizer
from redline.telemetry import RunFolder

STEPS = 8
CHECKPOINT_EVERY = 3
DTYPES = ("float32", "bfloat16") if bfloat16_flags() else ("float32",)
needs_bfloat16 = pytest.mark.skipif(
    "bfloat16" not in DTYPES, reason="this CPU has no bfloat16 instructions: a run would take many minutes"
)

Moment = Callable[[RunFolder], bool]


# ── the runs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two million parameters: writing a checkpoint of them takes long enough to be killed in the middle."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prepare(cwd: Path, model: Path, dtype: str, num_threads: int = 1) -> Path:
    return write_letters(
        cwd,
        run={"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "keep_checkpoints": 1, "num_threads": num_threads},
        model={"path": str(model), "dtype": dtype},
        rollouts={
            "groups_per_step": 2,
            "group_size": 4,
            "max_new_tokens": 12,
            "evaluation": {"num_tasks": 2, "every": 4},
        },
        trainer={
            "learning_rate": 1e-3,
            "max_tokens_per_micro_batch": 64,
            "schedule": {"warmup_steps": 6},
            "weight_decay": 0.01,
        },
    )


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """Dtype → a run from the first step to the last; all at once."""
    folders = {dtype: tmp_path_factory.mktemp(f"straight-{dtype}") for dtype in DTYPES}
    with ExitStack() as stack:
        processes = []
        for dtype, cwd in folders.items():
            prepare(cwd, model, dtype)
            processes.append(stack.enter_context(started("train", "letters.yaml", cwd=cwd)))
        assert [process.wait(TIMEOUT_S) for process in processes] == [0] * len(processes)
    return {dtype: only_run(cwd) for dtype, cwd in folders.items()}


def rows_logged(count: int) -> Moment:
    return lambda folder: num_rows(folder.metrics) >= count


def writing_a_checkpoint(folder: RunFolder) -> bool:
    return any(folder.checkpoints.glob(".*.partial"))


def checkpoint_written(step: int) -> Moment:
    return lambda folder: (folder.checkpoints / f"step-{step:06d}").exists()


def kill_when(moment: Moment, cwd: Path, *, resume: bool = False) -> RunFolder:
    """Start, or resume, and end with SIGKILL at the moment."""
    arguments = ["train", "letters.yaml", *(["--resume"] if resume else [])]
    with started(*arguments, cwd=cwd) as process:
        folder = wait_for_run(cwd, process)
        assert wait_until(lambda: moment(folder), process), "the run ended before the moment came"
        process.send_signal(signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    return folder


# ── what must be the same ──────────────────────────────────────────────────────────────────────────────────────────────


def assert_same_weights(found: RunFolder, expected: RunFolder) -> None:
    """Master weights and Adam's moments, and the model as saved."""
    assert max(path.name for path in found.checkpoints.glob("step-*")) == f"step-{STEPS:06d}"
    for file in (f"checkpoints/step-{STEPS:06d}/trainer.safetensors", "model/model.safetensors"):
        assert digest(found.path / file) == digest(expected.path / file), file


def assert_same_metrics(found: RunFolder, expected: RunFolder) -> None:
    """What was learned. Groups that were there already are not sampled again, so that a resumed step may report fewer."""
    assert [row["step"] for row in rows(found.metrics)] == list(range(1, STEPS + 1))
    assert list(map(learned, rows(found.metrics))) == list(map(learned, rows(expected.metrics)))


def learned(row: dict[str, Any]) -> dict[str, Any]:
    known = without_times(row).items()
    return {key: value for key, value in known if key.split("/")[0] in ("step", "trainer", "weight_sync") or "reward" in key}


def assert_same_trajectories(found: RunFolder, expected: RunFolder) -> None:
    """What was trained on, and when."""
    mine, right = (trained(folder) for folder in (found, expected))
    assert sorted(set(mine["version"].to_pylist())) == list(range(STEPS))
    assert list(map(without_seconds, mine.to_pylist())) == list(map(without_seconds, right.to_pylist()))


def trained(folder: RunFolder) -> pa.Table:
    table = pa.concat_tables(pa.ipc.open_file(path).read_all() for path in sorted(folder.trajectories.glob("*.arrow")))
    kept = table.filter(pc.field("version") >= 0)
    return kept.sort_by([(name, "ascending") for name in ("version", "group", "attempt")])


def assert_same_evaluations(found: RunFolder, expected: RunFolder) -> None:
    assert list(map(without_times, rows(found.evaluations))) == list(map(without_times, rows(expected.evaluations)))


def assert_same_run(found: RunFolder, expected: RunFolder) -> None:
    assert_same_weights(found, expected)
    assert_same_metrics(found, expected)
    assert_same_trajectories(found, expected)


# ── killed ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def killed_before_during_and_after_a_checkpoint(cwd: Path) -> RunFolder:
    """Three kills, then let run to the end."""
    folder = kill_when(rows_logged(2), cwd)
    assert not any(folder.checkpoints.iterdir())
    kill_when(writing_a_checkpoint, cwd, resume=True)
    kill_when(checkpoint_written(2 * CHECKPOINT_EVERY), cwd, resume=True)
    assert num_rows(folder.metrics) >= 2 * CHECKPOINT_EVERY
    succeed("train", "letters.yaml", "--resume", cwd=cwd)
    return folder


def killed_between_checkpoints_and_at_the_end(cwd: Path) -> RunFolder:
    """Two kills, the second between the last checkpoint and the saved model; then let run to the end."""
    folder = kill_when(rows_logged(CHECKPOINT_EVERY + 2), cwd)
    assert checkpoint_written(CHECKPOINT_EVERY)(folder)
    kill_when(checkpoint_written(STEPS), cwd, resume=True)
    assert not (folder.model / "model.safetensors").exists()
    succeed("train", folder.path, "--resume", cwd=cwd)
    return folder


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """Dtype → a run that was killed several times; all at once."""
    stories = {
        "float32": killed_before_during_and_after_a_checkpoint,
        "bfloat16": killed_between_checkpoints_and_at_the_end,
    }
    folders = {dtype: tmp_path_factory.mktemp(f"killed-{dtype}") for dtype in DTYPES}
    for dtype, cwd in folders.items():
        prepare(cwd, model, dtype)
    with ThreadPoolExecutor() as pool:
        told = {dtype: pool.submit(stories[dtype], cwd) for dtype, cwd in folders.items()}
    return {dtype: future.result() for dtype, future in told.items()}


@pytest.mark.slow
def test_killed_before_during_and_after_a_checkpoint_the_run_ends_bit_for_bit_the_same_in_float32(
    killed: dict[str, RunFolder], uninterrupted: dict[str, RunFolder]
) -> None:
    assert_same_run(killed["float32"], uninterrupted["float32"])


@pytest.mark.slow  # test_crashes.py kills faster runs, at moments that need not be caught
@needs_bfloat16
def test_killed_between_checkpoints_and_at_the_end_the_run_ends_bit_for_bit_the_same_in_bfloat16(
    killed: dict[str, RunFolder], uninterrupted: dict[str, RunFolder]
) -> None:
    assert_same_run(killed["bfloat16"], uninterrupted["bfloat16"])


@needs_bfloat16
def test_the_two_dtypes_give_different_runs_so_that_sameness_means_something(uninterrupted: dict[str, RunFolder]) -> None:
    with pytest.raises(AssertionError):
        assert_same_weights(uninterrupted["bfloat16"], uninterrupted["float32"])
    with pytest.raises(AssertionError):
        assert_same_metrics(uninterrupted["bfloat16"], uninterrupted["float32"])


@pytest.mark.slow  # test_crashes.py kills faster runs, and looks at their evaluations too
def test_no_evaluation_is_there_twice_after_a_kill_before_the_first_checkpoint(
    killed: dict[str, RunFolder], uninterrupted: dict[str, RunFolder]
) -> None:
    assert_same_evaluations(killed["float32"], uninterrupted["float32"])


@pytest.mark.slow
@needs_bfloat16
def test_no_evaluation_is_there_twice_after_a_kill_at_the_end(
    killed: dict[str, RunFolder], uninterrupted: dict[str, RunFolder]
) -> None:
    assert_same_evaluations(killed["bfloat16"], uninterrupted["bfloat16"])


@pytest.mark.slow  # test_crashes.py opens the traces of the runs that it kills
def test_a_killed_runs_trace_still_opens_with_one_process_per_start(killed: dict[str, RunFolder]) -> None:
    events = json.loads(killed["float32"].trace.read_text())
    assert {event["pid"] for event in events} == {1, 2, 3, 4}


@pytest.mark.slow
def test_lengths_of_earlier_attempts_are_known_again_after_a_resume(tmp_path: Path) -> None:
    """Tasks come again, and the engine has rows for one group: which begins first decides what is computed together."""
    found = []
    for name, stops in (("whole", (6,)), ("in parts", (3, 5, 6))):
        cwd = tmp_path / name
        cwd.mkdir()
        write_letters(
            cwd,
            run={"steps": stops[0], "checkpoint_every": 2},
            rollouts={"groups_per_step": 4, "group_size": 4, "max_new_tokens": 24, "evaluation": {"num_tasks": 0}},
            engine={"max_num_seqs": 4},
        )
        (cwd / "letters.py").write_text(LETTERS.replace("letters/{index}", "letters/{index % 7}"))
        succeed("train", "letters.yaml", cwd=cwd)
        for steps in stops[1:]:
            succeed("train", only_run(cwd).path, "--resume", f"run.steps={steps}", cwd=cwd)
        found.append(only_run(cwd))
    whole, parts = found
    assert [row["rollouts/expected_fraction"] for row in rows(parts.metrics)] == [0.0, 0.25, 1.0, 1.0, 1.0, 1.0]
    assert [row.get("rollouts/expected_error") for row in rows(parts.metrics)] == [
        row.get("rollouts/expected_error") for row in rows(whole.metrics)
    ]
    assert digest(parts.path / "model/model.safetensors") == digest(whole.path / "model/model.safetensors")


# ── interrupted ────────────────────────────────────────────────────────────────────────────────────────────────────────


HELD = """

def is_held(task):
    import pathlib, time

    while task.id == "letters/6" and pathlib.Path("hold").exists():
        time.sleep(0.01)
"""


def interrupt(cwd: Path, number: signal.Signals) -> None:
    """In the fourth step, whose first reward waits for that."""
    assert 'if "q"' in LETTERS
    (cwd / "letters.py").write_text(LETTERS.replace('if "q"', 'if is_held(task) or "q"') + HELD)
    (cwd / "hold").touch()
    with started("train", "letters.yaml", "--json", cwd=cwd) as process:
        folder = wait_for_run(cwd, process)
        assert wait_until(lambda: rows_logged(3)(folder), process)
        process.send_signal(number)
        (cwd / "hold").unlink()
        stdout = process.stdout.read()
        assert process.wait(TIMEOUT_S) == 130, (cwd / "stderr.txt").read_text()
    document = json.loads(stdout.splitlines()[-1])
    stopped_at = document["steps"]
    assert (document["finished"], document["model"]) == (False, None)
    assert 3 <= stopped_at < STEPS
    assert [row["step"] for row in rows(folder.metrics)] == list(range(1, stopped_at + 1)), "the step in flight was finished"
    assert [path.name for path in folder.checkpoints.iterdir()] == [f"step-{stopped_at:06d}"]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=lambda n: n.name)
def test_an_interrupt_ends_after_the_step_with_code_130_and_the_resumed_run_is_the_same(
    number: signal.Signals, model: Path, uninterrupted: dict[str, RunFolder], tmp_path: Path
) -> None:
    dtype = DTYPES[-1]
    prepare(tmp_path, model, dtype)
    interrupt(tmp_path, number)
    document = json.loads(succeed("train", "letters.yaml", "--resume", "--json", cwd=tmp_path))
    assert document["finished"]
    assert_same_run(only_run(tmp_path), uninterrupted[dtype])
    assert_same_evaluations(only_run(tmp_path), uninterrupted[dtype])


# ── refused ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def copied(uninterrupted: dict[str, RunFolder], tmp_path: Path) -> Path:
    """A finished run of one's own, with its recipe."""
    cwd = uninterrupted["float32"].path.parents[1]
    shutil.copytree(cwd, tmp_path / "copy")
    return tmp_path / "copy"


def content(folder: RunFolder) -> dict[str, str]:
    return {str(path): digest(path) for path in folder.path.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("override", ["trainer.learning_rate=1", "rollouts.group_size=2", "run.seed=3", "model.dtype=float32"])
def test_resuming_with_another_recipe_is_refused(copied: Path, override: str) -> None:
    before = content(only_run(copied))
    done = redline("train", only_run(copied).path, override, "--resume", cwd=copied)
    assert done.returncode == 2
    assert f"cannot take {override}" in done.stderr
    hint = done.stderr.partition("\n\nhint: ")[2]
    assert "run.steps=N may be given" in hint
    folder = only_run(copied).path
    assert f"these weights: redline train {folder}/config.json model.path={folder} {override}\n" in hint
    assert content(only_run(copied)) == before


def test_a_second_process_in_the_folder_is_refused(copied: Path) -> None:
    folder = only_run(copied)
    before = content(folder)
    with folder.locked():
        done = redline("train", folder.path, "--resume", cwd=copied)
    assert done.returncode == 2
    assert "is running in this folder" in done.stderr
    assert "\n\nhint: " in done.stderr
    assert content(folder) == before


# ── the long way ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_killed_at_every_step_of_the_way_the_run_ends_bit_for_bit_the_same(
    dtype: str, model: Path, uninterrupted: dict[str, RunFolder], tmp_path: Path
) -> None:
    prepare(tmp_path, model, dtype)
    for step in range(1, STEPS + 1):
        kill_when(rows_logged(step), tmp_path, resume=step > 1)
    succeed("train", "letters.yaml", "--resume", cwd=tmp_path)
    assert_same_run(only_run(tmp_path), uninterrupted[dtype])


@pytest.mark.slow
def test_killed_while_each_checkpoint_is_written_the_run_ends_bit_for_bit_the_same(
    model: Path, uninterrupted: dict[str, RunFolder], tmp_path: Path
) -> None:
    prepare(tmp_path, model, DTYPES[-1])
    caught = 0
    for attempt in range(6):
        folder = kill_when(writing_a_checkpoint, tmp_path, resume=attempt > 0)
        caught += writing_a_checkpoint(folder)
        if not writing_a_checkpoint(folder) and checkpoint_written(STEPS)(folder):
            break
        for partial in folder.checkpoints.glob(".*.partial"):
            assert not (folder.checkpoints / partial.name[1 : -len(".partial")]).exists()
            partial.rename(tmp_path / f"{attempt}{partial.name}")  # so that the next one is seen
    assert caught > 0, "no kill came while a checkpoint was half-way"
    succeed("train", "letters.yaml", "--resume", cwd=tmp_path)
    assert_same_run(only_run(tmp_path), uninterrupted[DTYPES[-1]])


@pytest.mark.slow
def test_killed_before_the_first_step_the_run_ends_bit_for_bit_the_same(
    model: Path, uninterrupted: dict[str, RunFolder], tmp_path: Path
) -> None:
    prepare(tmp_path, model, "float32")
    kill_when(lambda folder: folder.environment.exists(), tmp_path)
    kill_when(lambda folder: num_rows(folder.evaluations) > 0, tmp_path, resume=True)
    succeed("train", "letters.yaml", "--resume", cwd=tmp_path)
    assert_same_run(only_run(tmp_path), uninterrupted["float32"])


@pytest.mark.slow
def test_resuming_a_finished_run_changes_nothing(copied: Path, uninterrupted: dict[str, RunFolder]) -> None:
    succeed("train", "letters.yaml", "--resume", cwd=copied)
    assert_same_run(only_run(copied), uninterrupted["float32"])
    assert_same_evaluations(only_run(copied), uninterrupted["float32"])


@pytest.mark.slow
def test_a_run_may_be_made_longer_and_equals_one_that_was_long_from_the_start(
    copied: Path, model: Path, tmp_path: Path
) -> None:
    more = f"run.steps={STEPS + 2}"
    succeed("train", "letters.yaml", more, "--resume", cwd=copied)
    straight = tmp_path / "straight"
    straight.mkdir()
    prepare(straight, model, "float32")
    succeed("train", "letters.yaml", more, cwd=straight)
    found, expected = only_run(copied), only_run(straight)
    assert digest(found.model / "model.safetensors") == digest(expected.model / "model.safetensors")
    assert list(map(without_times, rows(found.metrics))) == list(map(without_times, rows(expected.metrics)))


@pytest.mark.slow
def test_a_longer_run_that_is_interrupted_resumes_without_being_told_again(copied: Path) -> None:
    with started("train", "letters.yaml", f"run.steps={STEPS + 200}", "--resume", cwd=copied) as process:
        assert wait_until(lambda: rows_logged(STEPS + 2)(only_run(copied)), process)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
    with started("train", "letters.yaml", "--resume", cwd=copied) as process:
        assert wait_until(lambda: rows_logged(STEPS + 20)(only_run(copied)), process)


@pytest.mark.slow
def test_resuming_to_fewer_steps_than_there_are_is_refused_and_changes_nothing(copied: Path) -> None:
    before = {path: digest(path) for path in copied.rglob("*") if path.is_file()}
    refused = redline("train", "letters.yaml", "run.steps=3", "--resume", cwd=copied)
    assert refused.returncode == 2
    assert f"has taken {STEPS} steps already; nothing was changed" in refused.stderr
    assert {path: digest(path) for path in copied.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_several_threads_give_the_same_run_after_a_kill(model: Path, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for cwd in (straight, killed):
        cwd.mkdir()
        prepare(cwd, model, DTYPES[-1], num_threads=2)
    succeed("train", "letters.yaml", cwd=straight)
    kill_when(rows_logged(CHECKPOINT_EVERY + 2), killed)
    succeed("train", "letters.yaml", "--resume", cwd=killed)
    assert_same_run(only_run(killed), only_run(straight))
