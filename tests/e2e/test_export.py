"""`redline export`: a checkpoint that transformers and PEFT load, and what is refused."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from support.processes import digest, only_run, redline, started, succeed, wait_until, write_letters
from transformers import AutoModelForCausalLM, AutoTokenizer

from redline.errors import RedlineError
from redline.launch.checkpointed import load_checkpointed
from redline.launch.engines import make_engine
from redline.launch.export import Export, choose
from redline.launch.export import export as write
from redline.models.files.sources import model_folder
from redline.types import GenerateRequest, SamplingParams

STEPS = 4
EARLIER, LAST = "step-000002", f"step-{STEPS:06d}"


def train(cwd: Path, **sections: dict) -> Path:
    run = {"steps": STEPS, "checkpoint_every": 2, "keep_checkpoints": 9}
    write_letters(cwd, run=run, **sections)
    succeed("train", "letters.yaml", "rollouts.evaluation.num_tasks=2", cwd=cwd)
    return cwd


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("adapter"), trainer={"lora": {"rank": 4, "alpha": 32}, "learning_rate": 1e-2})


def sampled_logprobs(cwd: Path, step: str) -> tuple[list[int], np.ndarray]:
    """A prompt with greedy tokens behind it, and what the engine of a run at this step says of each."""
    run = only_run(cwd)
    policy = load_checkpointed(run, run.checkpoints / step, "cpu")
    engine = make_engine(policy.model.decoder, policy.config.engine, policy.model.tokenizer)
    prompt = np.array(policy.model.tokenizer.encode("Tell me of the sea."), np.int32)
    [[completion]] = engine.generate([GenerateRequest(prompt, SamplingParams(max_tokens=12, temperature=0.0))])
    return [*prompt.tolist(), *completion.token_ids.tolist()], completion.logprobs


def assert_says(model: torch.nn.Module, tokens: list[int], logprobs: np.ndarray) -> None:
    """transformers gives the same tokens the same logprobs."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].float()
    start = len(tokens) - len(logprobs)
    found = logits[start - 1 : -1].log_softmax(-1)
    assert found.argmax(-1).tolist() == tokens[start:]
    np.testing.assert_allclose(found.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0], logprobs, atol=1e-4)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_transformers_loads_a_checkpoint_and_has_the_engines_logprobs(whole: Path) -> None:
    out = succeed("export", "runs/letters-001", "--step", "2", cwd=whole).strip()
    assert out == f"runs/letters-001/exports/{EARLIER}"
    tokens, logprobs = sampled_logprobs(whole, EARLIER)
    model, tokenizer = (kind.from_pretrained(whole / out) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert_says(model, tokens, logprobs)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith("<|im_start|>user")
    others, _ = sampled_logprobs(whole, LAST)
    assert others != tokens, "a test of one policy would show nothing"


def test_the_newest_checkpoint_of_a_run_that_has_ended_is_its_model(whole: Path) -> None:
    succeed("export", "runs/letters-001", "--to", "made/newest", cwd=whole)
    made, model = whole / "made" / "newest", only_run(whole).model
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in model.iterdir())
    for path in model.iterdir():
        assert digest(made / path.name) == digest(path)
    assert list((whole / "made").iterdir()) == [made], "nothing is left beside it"


def test_an_adapter_is_written_as_peft_has_it_and_merged_if_wanted(adapter: Path) -> None:
    alone = succeed("export", f"runs/letters-001/checkpoints/{EARLIER}", cwd=adapter).strip()
    merged = succeed("export", "runs/letters-001", "--step", "2", "--merge", cwd=adapter).strip()
    assert (alone, merged) == (f"runs/letters-001/exports/{EARLIER}-adapter", f"runs/letters-001/exports/{EARLIER}")
    tokens, logprobs = sampled_logprobs(adapter, EARLIER)
    base = AutoModelForCausalLM.from_pretrained(model_folder("builtin:tiny", seed=0))
    with pytest.raises(AssertionError):
        assert_says(base, tokens, logprobs)
    assert_says(PeftModel.from_pretrained(base, adapter / alone), tokens, logprobs)
    assert_says(AutoModelForCausalLM.from_pretrained(adapter / merged), tokens, logprobs)
    newest = adapter / succeed("export", "runs/letters-001", cwd=adapter).strip()
    assert digest(newest / "adapter_model.safetensors") == digest(only_run(adapter).adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/letters-001", "--step", "3"], "no checkpoint of that step\n\nhint: it has those of 2, 4"),
        (["runs/letters-001", "--merge"], "trained all weights\n\nhint: leave it out"),
        (["runs/letters-001", "--to", "runs"], "runs is there already, and is not overwritten\n\nhint: give another folder"),
        (["runs/letters-001", "--to", "letters.py"], "letters.py is there already"),
        (["runs/letters-002"], "no such run folder\n\nhint: did you mean runs/letters-001?"),
        ([f"runs/letters-001/checkpoints/{LAST}", "--step", "2"], "is another step\n\nhint: leave --step out"),
        (["letters.yaml"], "no such run folder"),
        (["runs/letters-001/model"], "a model, not a run"),
        (["runs/letters-001/checkpoints/step-000009"], f"no such checkpoint\n\nhint: those that it has: {EARLIER}, {LAST}"),
        (["runs/letters-001", "--to", "letters.py/x"], "letters.py is a file, not a folder"),
        (["runs/letters-001", "--to", "/proc/x"], "nothing can be written to /proc"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_fix(whole: Path, arguments: list[str], message: str) -> None:
    done = redline("export", *arguments, cwd=whole)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_without_checkpoints_says_where_its_model_is(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(only_run(tmp_path).checkpoints)
    done = redline("export", "runs/letters-001", cwd=tmp_path)
    assert "hint: its model is a Hugging Face folder already: runs/letters-001/model" in done.stderr
    shutil.rmtree(only_run(tmp_path).model)
    assert (
        "hint: train it: redline train runs/letters-001 --resume" in redline("export", "runs/letters-001", cwd=tmp_path).stderr
    )


def test_a_damaged_checkpoint_makes_no_folder(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    weights = only_run(tmp_path).checkpoints / LAST / "trainer.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"\xff" * 8)
    done = redline("export", "runs/letters-001", "--to", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert "damaged checkpoint" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_not_merged_into_another_base(adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path, dirs_exist_ok=True)
    run = only_run(tmp_path)
    config = json.loads(run.config.read_text())
    config["model"]["path"] = str(model_folder("builtin:tiny", seed=1))
    run.config.write_text(json.dumps(config))
    done = redline("export", "runs/letters-001", "--merge", "--to", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert "are not those that letters-001 began with" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_export_that_is_cut_off_leaves_nothing_that_looks_whole(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the middle of the writing, and a kill: the next export finds its way free."""
    run = only_run(whole)
    wanted = Export(run, run.checkpoints / LAST, tmp_path / "out", is_adapter=False)
    with monkeypatch.context() as patch:
        patch.setattr("redline.launch.result.record_step", lambda folder, step: (_ for _ in ()).throw(OSError("no room")))
        with pytest.raises(OSError, match="no room"):
            write(wanted)
    assert list(tmp_path.iterdir()) == []
    shutil.copytree(whole, tmp_path / "killed")
    cwd = tmp_path / "killed"
    with started("export", "runs/letters-001", "--to", "out", cwd=cwd) as process:
        wait_until(lambda: any(cwd.glob(".out.*partial")), process)
        process.kill()
        process.wait()
    if not (cwd / "out").exists():  # else the export was quicker than the kill
        succeed("export", "runs/letters-001", "--to", "out", cwd=cwd)
    assert {path.name: digest(path) for path in (cwd / "out").iterdir()} == {
        path.name: digest(path) for path in run.model.iterdir()
    }


# ── paths that do not say their names ──────────────────────────────────────────────────────────────────────────────────


def test_a_checkpoint_is_exported_from_within(whole: Path, tmp_path: Path) -> None:
    last = only_run(whole).checkpoints / LAST
    for number, given in enumerate((".", f"../{EARLIER}/", f"../../checkpoints/{LAST}")):
        to = tmp_path / str(number)
        assert succeed("export", given, "--to", to, cwd=last).strip() == str(to)
        assert json.loads((to / "redline.json").read_text()) == {"step": 2 if EARLIER in given else STEPS}


def test_the_folder_that_it_is_called_in_is_refused_before_anything_loads(whole: Path, tmp_path: Path) -> None:
    done = redline("export", only_run(whole).path, "--to", ".", cwd=tmp_path)
    assert done.returncode == 2
    assert f"cannot be replaced\n\nhint: give a folder in it: --to {LAST}" in done.stderr
    assert "loading" not in done.stderr


def test_an_empty_folder_is_filled_also_through_a_link(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    out = succeed("export", only_run(whole).path, "--to", "link", cwd=tmp_path).strip()
    assert out == "link"
    assert names(tmp_path) == ["link", "there"]
    assert names(tmp_path / "there") == names(only_run(whole).model)


# ── what happens while the model loads ─────────────────────────────────────────────────────────────────────────────────


def test_what_comes_to_lie_in_the_folder_while_the_model_loads_stays(whole: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    to.mkdir()
    wanted = choose(only_run(whole).path, to, None, merge=False)
    with pytest.raises(RedlineError, match=r"out: something came to lie there meanwhile.*\n\nhint: give another folder"):
        write(wanted, lambda text: (to / "mine.txt").write_text("kept") and None)
    assert {path.name: path.read_text() for path in to.iterdir()} == {"mine.txt": "kept"}
    assert names(tmp_path) == ["out"]


def test_of_two_exports_to_one_folder_the_second_to_end_is_refused(whole: Path, tmp_path: Path) -> None:
    run, to = only_run(whole), tmp_path / "out"
    first, second = (choose(run.path, to, step, merge=False) for step in (2, STEPS))
    with pytest.raises(RedlineError, match="is not overwritten"):
        write(first, lambda text: write(second) and None)
    assert {path.name: digest(path) for path in to.iterdir()} == {path.name: digest(path) for path in run.model.iterdir()}
    assert names(tmp_path) == ["out"]


def test_folders_beside_the_one_to_make_stay(whole: Path, tmp_path: Path) -> None:
    beside = [tmp_path / f".keep.{end}" for end in ("old", "partial")]
    for folder in beside:
        folder.mkdir()
        (folder / "mine.txt").write_text("kept")
    succeed("export", "runs/letters-001", "--to", tmp_path / "keep", cwd=whole)
    assert names(tmp_path) == [".keep.old", ".keep.partial", "keep"]
    assert [names(folder) for folder in beside] == [["mine.txt"]] * 2


@pytest.mark.parametrize("damage", [shutil.rmtree, lambda checkpoint: (checkpoint / "state.json").unlink()])
def test_a_checkpoint_that_the_run_removes_meanwhile_is_said_to_be_gone(
    whole: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """All of it, or not yet all: files go before their folder."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    run = only_run(tmp_path)
    config = json.loads(run.config.read_text())
    config["run"]["keep_checkpoints"] = 1
    run.config.write_text(json.dumps(config))
    wanted = choose(run.path, tmp_path / "out", 2, merge=False)
    damage(wanted.checkpoint)
    with pytest.raises(RedlineError, match=r"is gone: the run goes on, and keeps its newest 1\n\nhint: export again"):
        write(wanted)
    assert not wanted.to.exists()


# ── a full disk ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("trained", "writes"),
    [("whole", "huggingface_hub.save_torch_state_dict"), ("adapter", "redline.models.lora.peft.save_file")],
)
def test_a_full_disk_is_said_with_the_fix(
    trained: str, writes: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: No space left on device (os error {errno.ENOSPC})")

    wanted = choose(only_run(request.getfixturevalue(trained)).path, tmp_path / "out", None, merge=False)
    monkeypatch.setattr(writes, full)
    with pytest.raises(RedlineError, match="out: the export could not be written: No space left on device") as caught:
        write(wanted)
    assert caught.value.hint == "free some space, or give a folder on another disk with --to"
    assert list(tmp_path.iterdir()) == []
