"""The package and the one file that explains it take the same steps: same tokens, same losses, same weights.

Neither shares a line with the other, so a slip in either (a shifted logprob, a wrong mean, a lost gradient) shows here."""

from __future__ import annotations

import ast
import importlib.util
import io
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from support.paths import ROOT
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from redline.config import resolve, validate
from redline.launch.build import build
from redline.launch.placement import place
from redline.launch.preflight import load_tasks
from redline.launch.stages import Stages
from redline.models.files.hf import hf_tensors
from redline.models.files.tiny import write_tiny_model
from redline.telemetry import Progress, RunFolder
from redline.types import StepReport, Task, TrainBatch, Trajectory, TrajectoryGroup, WeightUpdate

EXAMPLE = ROOT / "examples" / "one_file_rl.py"
STEPS, SEED, TEMPERATURE, MAX_NEW_TOKENS, LEARNING_RATE = 5, 3, 0.8, 12, 1e-3
QUESTIONS = ["Say something.", "a b c", "Write a few letters, in any order you like.", "Which word is next?", "Spell it: x y z"]
"""Of several lengths; the last one is held out."""


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file_rl", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = load_example()


def share_of_letters(question: str, text: str) -> float:
    """A reward that a random model gets some of in every group."""
    return sum(char.isascii() and char.isalpha() for char in text) / max(1, len(text))


def has_a_z(question: str, text: str) -> float:
    """A reward so rare that whole steps go without."""
    return float("z" in text.lower())


class ExampleTasks:
    """The example's tasks and its reward, as a source for the package."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def train(self, index: int) -> Task:
        return self._task(example.train_question(index, self._seed))

    def held_out(self, count: int) -> list[Task]:
        return [self._task(question) for question in example.HELD_OUT[:count]]

    def score(self, task: Task, text: str) -> Mapping[str, float]:
        return {"reward": example.reward(task.id, text)}

    def _task(self, question: str) -> Task:
        return Task(question, [{"role": "user", "content": question}])


@dataclass
class Step:
    tokens: list[list[int]]
    """Of each attempt, prompt and completion."""
    logprobs: list[list[float]]
    rewards: list[float]
    loss: float
    grad_norm: float


@dataclass
class Run:
    """What both sides must agree on."""

    steps: list[Step] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """By Hugging Face's names, after the last step."""


# ── the two sides ──────────────────────────────────────────────────────────────────────────────────────────────────────


class RecordingWatch:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._attempts: list[Trajectory] = []

    def group_collected(self, group: TrajectoryGroup) -> None:
        self._attempts += group.trajectories

    def step_finished(self, batch: TrainBatch, report: StepReport, update: WeightUpdate) -> None:
        self._run.steps.append(
            Step(
                tokens=[t.token_ids.tolist() for t in self._attempts],
                logprobs=[t.logprobs[t.loss_mask].tolist() for t in self._attempts],
                rewards=[t.reward for t in self._attempts],
                loss=report.loss,
                grad_norm=report.grad_norm,
            )
        )
        self._run.reports.append(report)
        self._attempts = []

    def should_stop(self) -> bool:
        return False


def package_stages(model: Path, folder: Path) -> Stages:
    config = validate(
        {
            "run": {"seed": SEED, "steps": STEPS, "device": "cpu"},
            "model": {"path": str(model), "dtype": "float32"},
            "rollouts": {
                "task": {"kind": "import", "path": f"{__name__}:ExampleTasks"},
                "groups_per_step": example.GROUPS_PER_STEP,
                "group_size": example.GROUP_SIZE,
                "max_new_tokens": MAX_NEW_TOKENS,
                "temperature": TEMPERATURE,
                "evaluation": {"samples_per_task": example.EVALUATION_SAMPLES, "temperature": TEMPERATURE},
            },
            "trainer": {"learning_rate": LEARNING_RATE, "max_grad_norm": example.MAX_GRAD_NORM},
        }
    )
    quiet, config = Progress(STEPS, console=Console(file=io.StringIO())), resolve(config).config
    return build(config, RunFolder.create(folder, "run"), quiet, place(config), load_tasks(config))


def run_package(model: Path, folder: Path) -> Run:
    run, stages = Run(), package_stages(model, folder)

    def evaluate() -> None:
        attempts = stages.rollouts.evaluate(stages.held_out)
        run.evaluations.append(float(np.mean([t.reward for trajectories in attempts for t in trajectories])))

    evaluate()
    stages.run(RecordingWatch(run), STEPS)
    evaluate()
    run.weights = {name: tensor.clone() for name, tensor in hf_tensors(stages.model.decoder)}
    return run


def example_args() -> Namespace:
    return Namespace(
        steps=STEPS, seed=SEED, temperature=TEMPERATURE, max_new_tokens=MAX_NEW_TOKENS, learning_rate=LEARNING_RATE
    )


def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def run_example(model_folder: Path) -> Run:
    model, tokenizer = load_model(model_folder), AutoTokenizer.from_pretrained(model_folder)
    args, run = example_args(), Run()
    run.evaluations.append(example.evaluate(model, tokenizer, args))
    for groups, loss, grad_norm in example.train(model, tokenizer, args):
        attempts = [a for group in groups for a in group]
        tokens = [a.prompt + a.completion for a in attempts]
        run.steps.append(Step(tokens, [a.logprobs for a in attempts], [a.reward for a in attempts], loss, grad_norm))
    run.evaluations.append(example.evaluate(model, tokenizer, args))
    run.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return run


# ── same steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, SEED)
    return folder


def make_small(patch: pytest.MonkeyPatch, groups: int, group_size: int, reward: Callable[[str, str], float]) -> None:
    """Small groups, prompts of several lengths, a reward that random text can earn, and a gradient norm that is clipped."""
    for name, value in {
        "GROUPS_PER_STEP": groups,
        "GROUP_SIZE": group_size,
        "MAX_GRAD_NORM": 0.85,
        "TRAIN": QUESTIONS[:4],
        "HELD_OUT": QUESTIONS[4:],
        "reward": reward,
    }.items():
        patch.setattr(example, name, value)


@pytest.fixture
def small_example(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, 4, 8, share_of_letters)


@pytest.fixture(scope="module")
def package_run(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, 4, 8, share_of_letters)
        return run_package(model_folder, tmp_path_factory.mktemp("runs"))


def assert_same(package: Run, other: Run) -> None:
    """Tokens exactly; the rest within what float32 loses between a packed and a padded computation."""
    for ours, theirs in zip(package.steps, other.steps, strict=True):
        assert theirs.tokens == ours.tokens
        assert theirs.rewards == pytest.approx(ours.rewards, abs=1e-6)
        assert np.concatenate(theirs.logprobs) == pytest.approx(np.concatenate(ours.logprobs), abs=1e-4)
        assert theirs.loss == pytest.approx(ours.loss, rel=1e-5, abs=1e-6)
        assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=1e-5)
    assert other.evaluations == pytest.approx(package.evaluations, abs=1e-6)
    assert other.weights.keys() == package.weights.keys()
    for name, weight in package.weights.items():
        # Adam divides by the gradient's size, rounding errors included; each step may move a weight by the learning rate.
        torch.testing.assert_close(other.weights[name], weight, rtol=0, atol=LEARNING_RATE / 10)


@pytest.mark.usefixtures("small_example")
def test_the_package_takes_the_steps_of_the_example(package_run: Run, model_folder: Path) -> None:
    assert_same(package_run, run_example(model_folder))


@pytest.mark.usefixtures("small_example")
def test_the_steps_compared_have_something_to_compare(package_run: Run, model_folder: Path) -> None:
    steps = package_run.steps
    assert all(step.grad_norm > 0.1 for step in steps)
    assert any(step.grad_norm > example.MAX_GRAD_NORM for step in steps)
    assert any(step.grad_norm < example.MAX_GRAD_NORM for step in steps)
    assert len({len(completion) for step in steps for completion in step.logprobs}) > 1
    assert len({len(tokens) for tokens in steps[0].tokens}) > 2
    assert package_run.evaluations[0] != package_run.evaluations[1]
    for name, weight in load_model(model_folder).named_parameters():
        assert (package_run.weights[name] - weight).abs().max() > LEARNING_RATE, name


def test_a_step_without_signal_still_moves_the_optimizer(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch, 1, 4, has_a_z)
    package = run_package(model_folder, tmp_path)
    norms = [step.grad_norm for step in package.steps]
    assert any(before > 0 and after == 0 for before, after in pairwise(norms)), norms
    assert_same(package, run_example(model_folder))


def centred_only(rewards: list[float]) -> list[float]:
    return (np.array(rewards) - np.mean(rewards)).tolist()


def token_mean_loss(logprobs_GN: Tensor, old_logprobs_GN: Tensor, advantages_G1: Tensor, weights_GN: Tensor) -> Tensor:
    sampled_GN = (weights_GN > 0).float()
    return grpo_loss(logprobs_GN, old_logprobs_GN, advantages_G1, sampled_GN * weights_GN.sum() / sampled_GN.sum())


def shifted_draw(logprobs_BV: Tensor, streams: list[int], position: int) -> Tensor:
    return draw(logprobs_BV, streams, position + 1)


grpo_loss, draw = example.grpo_loss, example.draw


@pytest.mark.usefixtures("small_example")
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("group_advantages", centred_only),
        ("grpo_loss", token_mean_loss),
        ("draw", shifted_draw),
        ("MAX_GRAD_NORM", 1e9),
        ("EVALUATION_STREAM", 0),
    ],
)
def test_a_deliberate_mistake_shows(
    package_run: Run, model_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, broken: Any
) -> None:
    monkeypatch.setattr(example, name, broken)
    with pytest.raises(AssertionError):
        assert_same(package_run, run_example(model_folder))


# ── same loss away from the policy that sampled ────────────────────────────────────────────────────────────────────────
# In lockstep the ratio is 1 and a group's advantages sum to 0: every loss above is 0 up to rounding, and no ratio is clipped.
# Training on one batch again and again takes the policy away from its samples.


def package_reports_on_one_batch(model: Path, folder: Path) -> list[StepReport]:
    stages = package_stages(model, folder)
    stages.rollouts.begin(stages.buffer.admit(0), 0)
    for group in stages.rollouts.finished():
        stages.buffer.offer(group)
    batch = stages.buffer.next_batch(0)
    return [stages.trainer.step(batch) for _ in range(STEPS)]


def example_losses_on_one_batch(folder: Path) -> list[tuple[float, float]]:
    model, tokenizer, args = load_model(folder), AutoTokenizer.from_pretrained(folder), example_args()
    questions = [example.train_question(index, SEED) for index in range(example.GROUPS_PER_STEP)]
    groups = example.attempt(model, tokenizer, questions, example.GROUP_SIZE, 0, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    return [example.train_on(model, optimizer, groups, args) for _ in range(STEPS)]


@pytest.mark.usefixtures("small_example")
def test_losses_agree_where_ratios_are_clipped(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = package_reports_on_one_batch(model_folder, tmp_path)
    assert all(report.loss < -0.01 for report in reports[1:])
    assert reports[-1].clip_fraction > 0.05
    losses = example_losses_on_one_batch(model_folder)
    assert [loss for loss, _ in losses] == pytest.approx([r.loss for r in reports], rel=1e-5, abs=1e-6)
    assert [norm for _, norm in losses] == pytest.approx([r.grad_norm for r in reports], rel=1e-5)
    monkeypatch.setattr(example, "CLIP_HIGH", 0.3)
    assert [loss for loss, _ in example_losses_on_one_batch(model_folder)] != pytest.approx([r.loss for r in reports], rel=1e-4)


# ── the file itself ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_example_stands_alone_and_stays_short() -> None:
    source = EXAMPLE.read_text()
    nodes = list(ast.walk(ast.parse(source)))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in imported} - sys.stdlib_module_names == {"numpy", "torch", "transformers"}
    assert len(source.splitlines()) <= 230


def test_no_question_is_both_trained_on_and_held_out() -> None:
    assert not set(example.TRAIN) & set(example.HELD_OUT)
    assert len(example.TRAIN) + len(example.HELD_OUT) == 200
    assert {example.train_question(index, SEED) for index in range(3000)} == set(example.TRAIN)


def test_only_the_right_last_number_earns_the_reward() -> None:
    for question, answer in example.ANSWERS.items():
        assert example.reward(question, f"Easy: {answer}.") == 1
        assert example.reward(question, f"{answer}, or 99?") == example.reward(question, "No idea") == 0


def test_the_command_line_trains_a_model_folder(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", f"one_file_rl.py --model {model_folder} --steps 2 --max-new-tokens 4".split())
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:-1]] == ["step 1/2", "step 2/2"]
    assert [line.partition(":")[0] for line in (lines[0], lines[-1])] == ["held-out accuracy before", "held-out accuracy after"]


def test_without_a_model_the_command_line_says_where_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["one_file_rl.py"])
    with pytest.raises(SystemExit) as stopped:
        example.main()
    assert stopped.value.code == 2
    assert "make demo" in capsys.readouterr().err
