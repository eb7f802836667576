"""`redline tune` on a machine made of arithmetic: what is tried, kept, reverted and logged."""

from __future__ import annotations

import errno
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.paths import ROOT

from redline.config import Config, load_recipe, recipe_values, resolve
from redline.config.load import values_of
from redline.errors import ConfigError, SideError
from redline.lab.compare.command import Request, report_of
from redline.lab.compare.sides import What
from redline.lab.evidence.experiment import Pair, Round, Wish
from redline.lab.evidence.guards import check
from redline.lab.tune.command import Asked, _refuse_lower_lag
from redline.lab.tune.guards import Kept
from redline.lab.tune.inputs import inputs_of
from redline.lab.tune.log import TrialLog
from redline.lab.tune.proposals import Prediction, Proposal
from redline.lab.tune.recipe import written
from redline.lab.tune.space import SPACE, Change, Situation, changes, name_of, overrides_of, setting
from redline.lab.tune.text import line_of, lines_of
from redline.lab.tune.trials import Trial
from redline.lab.tune.tune import Budget, Look, Tuned, Tuning, explained, tolerances
from redline.launch.preflight import load_tasks

SMOKE = ROOT / "recipes" / "smoke.yaml"
BAD = (
    "trainer.max_tokens_per_micro_batch=24", "trainer.gradient_checkpointing=full", "engine.max_num_seqs=8",
    "engine.enable_prefix_caching=false", "run.device=cpu", "run.num_threads=1",
)  # fmt: skip
"""The slowest settings that tuning guides warn of; the lag is 0."""
ALGORITHM = (
    "learning_rate",
    "kl_coef",
    "clip_low",
    "loss",
    "group_size",
    "groups_per_step",
    "mini_batches",
    "temperature",
    "lora",
)
ROUNDS = 8


def config_of(change: Change) -> Config:
    return _config(*overrides_of(change))


@functools.cache
def _config(*overrides: str) -> Config:
    return resolve(load_recipe(SMOKE, [*BAD, *overrides])).config


def seconds(config: Config) -> float:
    """A step: sampling in waves of rows, training in pieces that each cost something; with a lag the longer of both."""
    waves = -(-64 // min(64, config.engine.max_num_seqs))
    sampling = 0.05 * waves + (0.0 if config.engine.enable_prefix_caching else 0.1)
    piece = config.trainer.max_tokens_per_micro_batch or 2000
    again = {"none": 1.0, "light": 1.1, "selective": 1.2, "full": 1.35}[config.trainer.gradient_checkpointing]
    training = (0.2 + 0.004 * 1500 / min(1500, piece)) * again
    both = max(sampling, training) * 1.1 if config.buffer.max_lag else sampling + training
    return both * (1.3 if config.placement.engines else 1.0) / (1.25 if (config.run.num_threads or 1) > 1 else 1.0)


@dataclass
class Machine:
    """Implements `Bench`. Times vary by a percent, and so do processes."""

    step_s: Callable[[Config], float] = seconds
    fails: dict[str, SideError] = field(default_factory=dict)
    """Override → what a process that has it ends with."""
    figures: Callable[[Config], dict[str, float]] = lambda config: {}
    predicts: dict[str, Prediction] = field(default_factory=dict)
    stops_before: int | None = None
    """Pairs after which somebody presses Ctrl-C."""
    pairs: int = 0
    disturbed: int | None = None
    """A pair in which something else has the machine while one side runs."""
    now: float = 0.0
    original_s: float = 10.0
    """Seconds of a pair with the recipe as it was; of others 10."""
    max_lag: int = 1

    def look(self, settings: Change) -> Look:
        config = config_of(settings)
        found = [
            Proposal(change, self.predicts.get(name_of(change)))
            for change in changes(Situation(config, self.max_lag, cores=2, tokens=1500, prompt_tokens=400))
        ]
        expected = sorted(found, key=lambda proposal: -(proposal.prediction.likely if proposal.prediction else 1.0))
        return Look(self.step_s(config), "bound by arithmetic", expected)

    def measure(self, a: Change, b: Change, number: int) -> Pair:
        if self.pairs == self.stops_before:
            raise KeyboardInterrupt
        self.pairs += 1
        self.now += 10.0 if a else self.original_s
        for side in (a, b):
            for override in overrides_of(side):
                if override in self.fails:
                    error = self.fails[override]
                    raise SideError(f"{name_of(side)} {error.message}", side=name_of(side), code=error.code)
        draw = Random(number)
        luck = [draw.gauss(1.0, 0.003) for _ in (a, b)]
        if self.pairs == self.disturbed:
            luck[1] *= 1.8
        rounds = [
            Round(*(self._row(s, draw, luck[i]) for i, s in enumerate((a, b))), place % 2 == 0) for place in range(ROUNDS)
        ]
        return Pair(rounds, (1e9, 1.2e9))

    def _row(self, settings: Change, draw: Random, luck: float) -> dict[str, float]:
        config = config_of(settings)
        step_s = self.step_s(config) * luck * draw.gauss(1.0, 0.01)
        row = {
            "run/step_s": step_s,
            "run/samples_per_s": 64 / step_s,
            "wall_s": step_s,
            "buffer/lag_mean": config.buffer.max_lag,
        }
        return {**row, "trainer/mismatch_kl": 1e-5, "not/kept": 1.0, **self.figures(config)}


def tuned(folder: Path, machine: Machine, **budget: Any) -> Tuned:
    with TrialLog.opened(folder, {"recipe": "smoke", "machine": "arithmetic"}) as log:
        return Tuning(machine, log, Budget(**budget), lambda line: None, lambda: machine.now).run()


def best() -> float:
    """By trying all settings."""
    keys = ("engine.max_num_seqs", "trainer.max_tokens_per_micro_batch", "trainer.gradient_checkpointing", "buffer.max_lag",
            "run.num_threads", "engine.enable_prefix_caching", "placement.engines")  # fmt: skip
    values = ((8, 64), (None, 24, 400), ("none", "full"), (0, 1), (1, 2), (True,), (0, 1))
    return min(seconds(config_of(dict(zip(keys, each, strict=True)))) for each in itertools.product(*values))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """The bad recipe, tuned without anything in the way."""
    return tuned(tmp_path_factory.mktemp("usual"), Machine())


def test_a_bad_recipe_becomes_as_fast_as_the_best_that_there_is(usual: Tuned) -> None:

    assert seconds(config_of(usual.state.kept)) < 1.02 * best()
    assert len(usual.state.trials) <= 30
    assert "nothing is left" in usual.ended


def test_one_disturbed_pair_of_the_noise_hides_no_gain(tmp_path: Path) -> None:
    found = tuned(tmp_path, Machine(disturbed=3))
    assert seconds(config_of(found.state.kept)) < 1.02 * best()


def test_the_proof_is_a_document_of_compare_and_covers_the_true_gain(usual: Tuned) -> None:
    assert usual.experiment is not None
    request = Request("a.yaml", "b.yaml", What(), Wish(), guards=tolerances(usual.state.kept))
    document = report_of(request, usual.experiment).as_json()
    truth = seconds(config_of({})) / seconds(config_of(usual.state.kept))
    low, high = document["results"][0]["peer"]["interval_95"]
    assert document["verdict"] == "faster"
    assert low * 0.98 < truth < high * 1.02
    assert document["case"] == "compare"


def test_a_lag_that_was_kept_breaks_no_guard_of_the_proof_however_little_mismatch_there_was() -> None:
    """In lockstep on a CPU engine and trainer agree to the last digits: any share of that is nothing."""
    rounds = [Round({"trainer/mismatch_kl": 4e-14}, {"trainer/mismatch_kl": 1.4e-3}, a_first=True)] * 6
    pairs = [Pair(rounds)] * 8
    assert [guard.state for guard in check(pairs, tolerances({}))] == ["broken"]
    assert [guard.state for guard in check(pairs, tolerances({"buffer.max_lag": 1}))] == ["holds"]


def test_only_keys_of_the_space_change_and_none_is_the_algorithms(usual: Tuned) -> None:
    assert usual.state.kept.keys() <= SPACE.keys()
    assert not [key for key in SPACE if any(part in ALGORITHM for part in key.split("."))]
    for key in SPACE:
        setting(config_of({}), key)  # each is a key of the recipe


@pytest.mark.parametrize(
    ("message", "code", "kind"),
    [
        ("ended with exit code 1:\nRuntimeError: CUDA out of memory", 1, "memory"),
        ("ended with exit code -9", -9, "memory"),
        ("ended with exit code 1:\nValueError: odd", 1, "crash"),
        ("not done after 120 s", None, "hang"),
    ],
)
def test_a_side_that_gives_no_figures_is_a_trial_like_any_other(
    tmp_path: Path, message: str, code: int | None, kind: str
) -> None:
    machine = Machine(fails={"trainer.gradient_checkpointing=none": SideError(message, code=code)})
    result = tuned(tmp_path, machine)
    failed = [trial for trial in result.state.trials if trial.outcome == "failed"]
    assert {trial.failure for trial in failed} == {kind}
    assert result.state.kept["trainer.gradient_checkpointing"] == "light"
    assert "no memory" in failed[0].why if kind == "memory" else failed[0].why
    assert len(failed) <= 2


def test_a_full_disk_says_nothing_of_a_change_and_ends_the_tuning_which_then_goes_on(tmp_path: Path, usual: Tuned) -> None:
    message = "ended with exit code 1:\nTraceback …\nOSError: [Errno 28] No space left on device: '/tmp/x'"
    machine = Machine(fails={"trainer.gradient_checkpointing=none": SideError(message, code=1)})
    with pytest.raises(OSError, match="No space left") as caught:
        tuned(tmp_path, machine)
    assert caught.value.errno == errno.ENOSPC
    again = tuned(tmp_path, Machine())
    assert not [trial for trial in again.state.trials if trial.outcome == "failed"]
    assert again.state.kept == usual.state.kept


def test_a_recipe_that_does_not_run_itself_is_told_and_changes_nothing(tmp_path: Path) -> None:
    class Broken(Machine):
        def measure(self, a: Change, b: Change, number: int) -> Pair:
            raise SideError(f"{name_of(a)} ended with exit code 1", side=name_of(a), code=1)

    with pytest.raises(SideError, match="as it is ended") as caught:
        tuned(tmp_path, Broken())
    assert "does not run as it is" in explained(caught.value).message
    assert "redline plan" in explained(caught.value).hint


@pytest.mark.parametrize("stops_before", [0, 5, 12])
def test_a_tuning_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, usual: Tuned, stops_before: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path / "parts", Machine(stops_before=stops_before))
    with (tmp_path / "parts" / "log.jsonl").open("a") as log:
        log.write('{"kind": "trial", "change": {"half')  # a kill in the middle of a line
    parts = tuned(tmp_path / "parts", Machine())
    assert _tried(parts) == _tried(usual)
    assert parts.state.kept == usual.state.kept
    again = Machine()
    tuned(tmp_path / "parts", again)
    assert again.pairs == 0  # all of it is in the log


def _tried(result: Tuned) -> list[tuple[str, str, float]]:
    return [(trial.name, trial.outcome, trial.gain.ratio if trial.gain else 0.0) for trial in result.state.trials]


def test_a_change_is_tried_again_when_its_seconds_weigh_more(tmp_path: Path) -> None:
    """Recomputing costs 0.02 s: nothing of a step of 2 s, a tenth of one of 0.2 s."""

    def step_s(config: Config) -> float:
        recomputed = 0.0 if config.trainer.gradient_checkpointing == "none" else 0.02
        return (0.2 if config.engine.max_num_seqs == 64 else 2.0) + recomputed

    first = Prediction(1.2, 1.1, 1.3, "doctor", "")
    result = tuned(tmp_path, Machine(step_s=step_s, predicts={"trainer.gradient_checkpointing=none": first}))
    own = [trial.outcome for trial in result.state.trials if trial.name == "trainer.gradient_checkpointing=none"]
    assert own == ["reverted", "kept"]


def test_a_change_that_samples_less_is_reverted_however_fast_it_is(tmp_path: Path) -> None:
    machine = Machine(figures=lambda config: {"run/samples_per_s": 1.0} if config.engine.max_num_seqs > 8 else {})
    result = tuned(tmp_path, machine)
    own = [trial for trial in result.state.trials if "engine.max_num_seqs" in trial.change]
    assert {trial.outcome for trial in own} == {"reverted"}
    assert "samples a step 64 → " in own[0].why
    assert "engine.max_num_seqs" not in result.state.kept


def test_a_lag_is_kept_with_what_it_does_to_the_samples_beside_it(tmp_path: Path) -> None:
    machine = Machine(figures=lambda config: {"trainer/mismatch_kl": 0.02} if config.buffer.max_lag else {})
    result = tuned(tmp_path, machine)
    [trial] = [trial for trial in result.state.trials if trial.outcome == "kept" and "buffer.max_lag" in trial.change]
    line = line_of(3, trial)
    assert "lag 0 → 1 steps" in line
    assert "mismatch 1e-05 → 0.02 nats" in line
    assert "peak memory 1.00 GB → 1.20 GB" in line
    without = tuned(tmp_path / "without", Machine(max_lag=0))
    assert "buffer.max_lag" not in without.state.kept


def test_a_mismatch_that_is_rounding_is_not_told() -> None:
    assert not Kept("mismatch", 4e-14, 8e-14, is_broken=False).is_told
    assert Kept("mismatch", 1e-3, 2e-3, is_broken=False).is_told


def test_where_nothing_pays_nothing_is_kept_and_no_proof_is_needed(tmp_path: Path) -> None:
    result = tuned(tmp_path, Machine(step_s=lambda config: 1.0))
    assert result.state.kept == {}
    assert result.experiment is None
    assert "nothing is left" in result.ended
    assert "nothing was kept" in "\n".join(lines_of(result, ""))


def test_a_change_that_is_predicted_to_gain_nothing_costs_no_trial(tmp_path: Path) -> None:
    none = Prediction(1.0, 1.0, 1.01, "simulator", "")
    result = tuned(tmp_path, Machine(predicts={"engine.max_num_seqs=64": none, "engine.max_num_seqs=32": none}, max_lag=0))
    assert not [trial for trial in result.state.trials if "engine.max_num_seqs" in trial.change]


def test_trials_and_minutes_end_it_with_the_proof_of_what_was_kept(tmp_path: Path) -> None:
    few = tuned(tmp_path / "few", Machine(), trials=2)
    assert len(few.state.trials) == 2
    assert few.ended == "as many as were allowed"
    assert few.experiment is not None
    short = tuned(tmp_path / "short", Machine(), seconds=150.0)
    assert short.ended == "then the time was up"
    assert short.experiment is not None
    assert 1 <= len(short.experiment.pairs) <= 12


@pytest.mark.parametrize("seconds", [400, 425, 450, 475])
def test_the_search_leaves_the_proof_its_time(tmp_path: Path, seconds: int) -> None:
    """Pairs with the slow recipe take three times as long as those of the last trials, and a trial several pairs."""
    machine = Machine(original_s=30.0)
    result = tuned(tmp_path, machine, seconds=float(seconds))
    assert result.experiment is not None
    assert not result.experiment.out_of_time
    assert machine.now <= seconds


def test_every_line_of_the_log_says_what_was_expected_beside_what_was_measured(tmp_path: Path) -> None:
    expected = Prediction(1.5, 1.2, 2.0, "doctor", "rows are cheap")
    tuned(tmp_path, Machine(predicts={"engine.max_num_seqs=64": expected}))
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows[0]["kind"] == "begun"
    first = next(row for row in rows if row["kind"] == "trial")
    assert first["change"] == {"engine.max_num_seqs": 64}
    assert first["predicted"]["likely"] == 1.5
    assert first["measured"]["low"] < first["measured"]["ratio"] < first["measured"]["high"]
    assert "predicted 1.50 (1.20 to 2.00, doctor)" in line_of(1, Trial.from_json(first))
    assert not [row for row in rows if "not/kept" in json.dumps(row)]


def test_a_log_of_another_recipe_and_of_another_process_is_refused(tmp_path: Path) -> None:
    own = {"recipe": "a", "machine": "m"}
    with TrialLog.opened(tmp_path, own), pytest.raises(ConfigError, match="another process"), TrialLog.opened(tmp_path, own):
        pass
    with pytest.raises(ConfigError, match="another recipe"), TrialLog.opened(tmp_path, {"recipe": "b", "machine": "m"}):
        pass


def test_the_tuned_recipe_is_one_that_train_takes_with_the_reasons_in_it(tmp_path: Path, usual: Tuned) -> None:

    path = tmp_path / "recipe.yaml"
    text = written(recipe_values(SMOKE, BAD), usual.state.kept, usual.state.trials, ["smoke, tuned"])
    path.write_text(text)
    assert resolve(load_recipe(path)).config == config_of(usual.state.kept)
    assert "# was 8; " in text
    assert "# was left out; " in text or "# was full; " in text
    assert text.startswith("# smoke, tuned\n")


def test_a_recipe_is_written_so_that_it_reads_as_what_it_was() -> None:
    values = {"model": {"path": "x", "revision": "5e10387"}, "rollouts": {"system_prompt": "Be brief.\nOr 1e5", "level": "1e5"}}
    text = written(values, {}, [], ["x.yaml rollouts.system_prompt=Be brief.\nbuffer: {store: true}\u2028a: 1\x07"])
    assert values_of(text, "x") == values
    assert text.startswith("# x.yaml rollouts.system_prompt=Be brief.\n# buffer: {store: true}\n# a: 1\n")


@pytest.mark.parametrize("line", ['{"kind": "tri', '{"kind": "trial"}', '{"no": "kind"}', "[1]"])
def test_a_log_with_a_damaged_line_is_refused_unless_it_is_the_last_and_cut(tmp_path: Path, line: str) -> None:
    own = {"recipe": "a"}
    with TrialLog.opened(tmp_path, own) as log:
        log.append("look", settings={})
    path = tmp_path / "log.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"kind": "tri')
    with TrialLog.opened(tmp_path, own) as log:
        assert log.state.looked == [{}]
    first, second = whole.splitlines(keepends=True)
    path.write_text(first + line + "\n" + second)
    with pytest.raises(ConfigError, match="line 2 is damaged"), TrialLog.opened(tmp_path, own):
        pass


def test_a_tuning_that_kept_a_lag_does_not_go_on_below_it(tmp_path: Path) -> None:
    asked = Asked(SMOKE, (), tmp_path, Budget(), max_lag=0)
    _refuse_lower_lag(asked, {})
    with pytest.raises(ConfigError, match=r"has kept buffer\.max_lag=1 already"):
        _refuse_lower_lag(asked, {"buffer.max_lag": 1})


def test_the_time_also_ends_a_search_that_has_kept_nothing(tmp_path: Path) -> None:
    machine = Machine(step_s=lambda config: 1.0)
    result = tuned(tmp_path, machine, seconds=75.0)
    assert result.ended == "then the time was up"
    assert machine.now < 75 + 30 + 1  # a trial that has begun ends: three pairs of ten seconds
    assert result.experiment is None


def test_a_tuning_that_goes_on_leaves_the_proof_its_time_too(tmp_path: Path) -> None:
    """Pairs with the recipe as it was take three times as long as those of later trials, and only the first call had some."""
    tuned(tmp_path, Machine(original_s=30.0), trials=1, seconds=200.0)
    again = Machine(original_s=30.0)
    result = tuned(tmp_path, again, seconds=320.0)
    assert len(result.state.trials) > 1
    assert result.experiment is not None
    assert not result.experiment.out_of_time
    assert again.now <= 320


def test_a_file_of_somebody_else_is_refused_and_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    theirs = '{"loss": 1.0}\n{"loss": 0.5}'
    path.write_text(theirs)
    with pytest.raises(ConfigError, match="not the log of a tuning"), TrialLog.opened(tmp_path, {"recipe": "a"}):
        pass
    assert path.read_text() == theirs
    path.write_text('{"kind": "beg')  # a kill in the first line
    with TrialLog.opened(tmp_path, {"recipe": "a"}) as log:
        assert not log.state.trials


def test_other_weights_or_tasks_in_the_same_place_are_another_tuning(tmp_path: Path) -> None:
    model, tasks = tmp_path / "model", tmp_path / "tasks.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"one" * 50_000)
    tasks.write_text("".join(f'{{"prompt": "{a} + {b}", "answer": "{a + b}"}}\n' for a in range(9) for b in range(9)))
    own = [f"model.path={model}", f"rollouts.task={{kind: file, path: {tasks}}}"]

    def identity(*overrides: str) -> dict[str, Any]:
        config = resolve(load_recipe(SMOKE, overrides)).config
        return {"recipe": "a", **inputs_of(config, load_tasks(config))}

    for _ in range(2):
        with TrialLog.opened(tmp_path / "out", identity(*own)):
            pass
    (model / "model.safetensors").write_bytes(b"two" * 50_000)
    with pytest.raises(ConfigError, match="of another model"), TrialLog.opened(tmp_path / "out", identity(*own)):
        pass
    tasks.write_text(tasks.read_text().replace("8 + 8", "7 + 9"))
    with pytest.raises(ConfigError, match="another model and set of tasks"), TrialLog.opened(tmp_path / "out", identity(*own)):
        pass
    assert identity() == {"recipe": "a", "model": "", "set_of_tasks": ""}, "names in the recipe say all"
