"""`redline export`: a checkpoint that transformers and PEFT load, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from support.processes import digest, only_run, redline, started, succeed, wait_until, write_letters
from transformers import AutoModelForCausalLM, AutoTokenizer

from redline.launch.checkpointed import load_checkpointed
from redline.launch.engines import make_engine
from redline.launch.export import Export
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
        wait_until(lambda: (cwd / ".out.partial").exists(), process)
        process.kill()
        process.wait()
    if not (cwd / "out").exists():  # else the export was quicker than the kill
        succeed("export", "runs/letters-001", "--to", "out", cwd=cwd)
    assert {path.name: digest(path) for path in (cwd / "out").iterdir()} == {
        path.name: digest(path) for path in run.model.iterdir()
    }
    assert not (cwd / ".out.partial").exists()
