from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.errors import CompareError, ConfigError, RedlineError
from redline.lab.compare.command import Report, Request, compare, opening
from redline.lab.compare.saved import read_saved
from redline.lab.compare.sides import OWN_SOURCE, What, jobs, worktree
from redline.lab.evidence.experiment import Wish
from redline.lab.evidence.verdict import Verdict

TREE = str(OWN_SOURCE.parent)
RECIPE = OWN_SOURCE.parent / "recipes" / "smoke.yaml"
ON_CPU = What(overrides=["run.device=cpu"])


# ── what is said first ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_line_says_what_is_compared_how_many_pairs_and_minutes_that_takes_and_how_few_are_too_few() -> None:
    request = Request("a.yaml", "a.yaml", What(b_overrides=["rollouts.group_size=4"]), Wish(max_pairs=20, max_seconds=600))
    assert opening(request) == (
        "comparing A = a.yaml with B = a.yaml rollouts.group_size=4: one pair to warm up, 8 pairs of A with itself, then at"
        " most 20 of A and B, for at most 10 minutes in all; fewer than 8 pairs of A and B give no verdict"
    )


# ── what runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_recipes_run_with_this_source_and_their_own_overrides() -> None:
    what = What(overrides=["run.device=cpu"], b_overrides=["trainer.max_tokens_per_micro_batch=512"])
    with jobs(str(RECIPE), str(RECIPE), what) as (a, b):
        assert a.source == b.source == OWN_SOURCE
        assert a.task == {"recipe": str(RECIPE), "overrides": ["run.device=cpu"]}
        assert b.task["overrides"] == ["run.device=cpu", "trainer.max_tokens_per_micro_batch=512"]
        assert b.name.endswith("smoke.yaml trainer.max_tokens_per_micro_batch=512")


def test_a_side_says_how_old_its_samples_may_be() -> None:
    with jobs(str(RECIPE), str(RECIPE), What(overrides=["run.device=cpu"], b_overrides=["buffer.max_lag=2"])) as (a, b):
        assert (a.lag, b.lag) == (0, 2)
    with jobs(TREE, TREE, What(recipe=RECIPE, overrides=["run.device=cpu", "buffer.max_lag=1"])) as (a, b):
        assert (a.lag, b.lag) == (1, 1)


def test_a_source_tree_runs_a_case() -> None:
    with jobs(TREE, TREE, What(case="trainer", overrides=["device=cpu"])) as (a, b):
        assert a is b
        assert a.task == {"case": "trainer", "overrides": ["device=cpu"]}


@pytest.mark.parametrize(
    ("a", "b", "what", "message"),
    [
        (str(RECIPE), TREE, ON_CPU, "not of one kind"),
        (TREE, TREE, What(), "is a source to run something with"),
        (TREE, TREE, What(recipe=RECIPE, case="trainer"), "is a source to run something with"),
        (TREE, TREE, What(case="trainr"), "no case of redline bench"),
        (TREE, TREE, What(case="trainer", overrides=["tokns=3"]), "unknown key"),
        (str(RECIPE), str(RECIPE), What(case="trainer"), "is a recipe"),
        (str(RECIPE), str(RECIPE), What(b_overrides=["trainer.learing_rate=1"]), "unknown key"),
        (str(RECIPE), str(RECIPE), What(b_overrides=["rollouts.evaluation.every=13"]), "neither side evaluates"),
        (str(RECIPE), str(RECIPE), What(a_overrides=["run.checkpoint_every=2"]), "neither side evaluates"),
        ("nowhere", TREE, What(case="trainer", overrides=["device=cpu"]), "no recipe"),
        ("old.json", TREE, What(case="trainer"), "only be compared with another one"),
        ("missing.yaml", "missing.yaml", What(), "no such recipe"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is(a: str, b: str, what: What, message: str) -> None:
    with pytest.raises(RedlineError, match=message), jobs(a, b, what):
        pass


# ── revisions ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def git(folder: Path, *arguments: str) -> str:
    person = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    done = subprocess.run(["git", *person, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits; the package is a file that says which."""
    package = tmp_path / "src" / "redline"
    package.mkdir(parents=True)
    git(tmp_path, "init", "--quiet")
    for number in (1, 2):
        (package / "__init__.py").write_text(f"NUMBER = {number}\n")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", "-m", str(number))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_worktree_has_the_revision_and_is_gone_afterwards(repository: Path) -> None:
    found: list[Path] = []

    def look_and_stop() -> None:
        with worktree("HEAD~1") as source:
            found.append(source)
            assert (source / "redline" / "__init__.py").read_text() == "NUMBER = 1\n"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look_and_stop()
    assert not found[0].exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert (repository / "src" / "redline" / "__init__.py").read_text() == "NUMBER = 2\n"


def test_a_revision_that_is_not_there_is_named(repository: Path) -> None:
    with pytest.raises(CompareError, match="no such revision"), worktree("nowhere"):
        pass


# ── saved results ──────────────────────────────────────────────────────────────────────────────────────────────────────


def saved(
    path: Path, samples: Sequence[Any], *, unit: str = "s", device: str = "cpu", config: Any = None, **identity: Any
) -> str:
    result = {"name": "step", "value": 1.0, "unit": unit, "samples": list(samples)}
    said = {"device": device, "config": config, **identity}
    path.write_text(json.dumps({"case": "x", "identity": said, "results": [result]}))
    return str(path)


def report(a: str, b: str, metric: str | None = None) -> Report:
    return compare(Request(a, b, What(), Wish(), metric), Console(quiet=True))


NEAR = [1.0, 1.01, 0.99, 1.02, 0.98, 1.005, 0.995, 1.015, 0.985, 1.003]


def test_two_sessions_are_compared_without_pairs(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.json", NEAR)
    b = saved(tmp_path / "b.json", [value / 1.3 for value in reversed(NEAR)])
    found = report(a, b)
    assert (found.verdict.kind, found.verdict.exit_code) == ("faster", 0)
    assert found.verdict.comparison.ratio == pytest.approx(1.3, rel=0.01)
    assert found.verdict.sentence.endswith("10 samples of each")
    assert report(b, a).verdict.exit_code == 1


def test_other_devices_or_settings_are_no_comparison(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.json", NEAR, config={"tokens": 1, "seed": 0})
    b = saved(tmp_path / "b.json", NEAR, device="NVIDIA H200", config={"tokens": 2, "seed": 0})
    verdict = report(a, b).verdict
    assert verdict.exit_code == 2
    assert verdict.reasons == ["A was measured on cpu, B on NVIDIA H200", "not the same settings: tokens"]


def test_seven_samples_of_a_session_are_too_few(tmp_path: Path) -> None:
    """Their ranks could not be further apart, yet the rounds of a session are not independent."""

    def compared(num_a: int, num_b: int) -> Verdict:
        faster = [value / 1.5 for value in NEAR]
        return report(saved(tmp_path / "a.json", NEAR[:num_a]), saved(tmp_path / "b.json", faster[:num_b])).verdict

    assert compared(8, 8).kind == "faster"
    few = compared(10, 7)
    assert (few.kind, few.exit_code) == ("abstained", 2)
    assert few.reasons == ["10 and 7 samples are too few, 8 of each are the fewest that count"]


XEON = {"model": "Xeon", "cores": 16, "usable_cores": 2, "flags": ["amx_bf16"]}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("model", "Neoverse-N1", "not the same CPU: A Xeon, B Neoverse-N1"),
        ("usable_cores", 64, "not the same usable cores: A 2, B 64"),
        ("flags", [], "not the same flags of the CPU: A amx_bf16, B none"),
        ("flags", None, "not the same flags of the CPU: A amx_bf16, B unknown"),
    ],
)
def test_another_cpu_is_another_device(tmp_path: Path, key: str, value: Any, reason: str) -> None:
    a = saved(tmp_path / "a.json", NEAR, cpu=XEON)
    b = saved(tmp_path / "b.json", [value * 2.6 for value in NEAR], cpu=XEON | {key: value})
    verdict = report(a, b).verdict
    assert (verdict.exit_code, verdict.reasons) == (2, [reason])


def test_cores_of_the_machine_that_were_not_used_do_not_count(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.json", NEAR, cpu=XEON)
    b = saved(tmp_path / "b.json", [value * 1.3 for value in NEAR], cpu=XEON | {"cores": 2})
    assert report(a, b).verdict.kind == "slower"


def test_another_driver_of_a_gpu_is_no_comparison_and_another_host_is_said(tmp_path: Path) -> None:
    def on(name: str, driver: str, cpu: dict[str, Any]) -> str:
        gpus = [{"name": "NVIDIA T4", "driver": "1"}, {"name": "NVIDIA H200", "driver": driver}]
        return saved(tmp_path / name, NEAR, device="NVIDIA H200", gpus=gpus, cpu=cpu)

    a = on("a.json", "580", XEON)
    assert report(a, on("b.json", "590", XEON)).verdict.reasons == ["not the same driver: A 580, B 590"]
    other_host = report(a, on("c.json", "580", XEON | {"usable_cores": 12})).verdict
    assert other_host.kind == "no different"
    assert other_host.sentence.endswith("; around them A and B had usable cores 2 and 12")


def test_other_versions_are_said_beside_the_verdict(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.json", NEAR, packages={"torch": "2.11.0", "numpy": "2.4.6"})
    b = saved(tmp_path / "b.json", [value / 1.3 for value in NEAR], packages={"torch": "2.13.0", "numpy": "2.4.6"})
    found = report(a, b)
    assert found.verdict.kind == "faster"
    assert found.verdict.sentence.endswith("10 samples of each; around them A and B had torch 2.11.0 and 2.13.0")
    assert found.as_json()["notes"] == ["around them A and B had torch 2.11.0 and 2.13.0"]


def test_two_sides_of_one_file_are_pairs(tmp_path: Path) -> None:
    """The machine halves its speed on the way, which only pairs survive."""
    rounds = [
        {"redline": {"tokens_per_s": 130 / 1.1**i * x}, "peer": {"tokens_per_s": 100 / 1.1**i}} for i, x in enumerate(NEAR)
    ]
    path = saved(tmp_path / "a.json", rounds, unit="tok/s")
    verdict = report(f"{path}#peer", f"{path}#redline").verdict
    assert verdict.kind == "faster"
    assert verdict.comparison.ratio == pytest.approx(1.3, rel=0.01)
    assert verdict.comparison.interval[0] > 1.28


def test_samples_may_have_several_figures(tmp_path: Path) -> None:
    flat = [{"step_s": value, "tokens_per_s": 10.0} for value in NEAR]
    path = saved(tmp_path / "a.json", flat)
    assert read_saved(path, None).samples == NEAR
    assert read_saved(path, "step:tokens_per_s").samples == [10.0] * 10
    assert read_saved(path, "step:tokens_per_s").larger_is_better


def document(path: Path, *results: dict[str, Any], case: str = "x") -> str:
    """A saved result as `redline bench` writes it: `fraction_of_bound` is value / bound where more is better."""
    path.write_text(json.dumps({"case": case, "identity": {"device": "cpu", "config": None}, "results": list(results)}))
    return str(path)


def result(name: str, samples: Sequence[Any], value: float, unit: str, *, larger: bool) -> dict[str, Any]:
    bound = 2 * value if larger else value / 2
    return {"name": name, "value": value, "unit": unit, "samples": samples, "bound": {"value": bound}, "fraction_of_bound": 0.5}


@pytest.mark.parametrize(
    ("unit", "larger"), [("ns", False), ("$", False), ("%", False), ("%", True), ("×", False), ("×", True)]
)
def test_a_document_says_which_way_its_figure_is_better(tmp_path: Path, unit: str, larger: bool) -> None:
    worse = [value / 1.2 if larger else value * 1.2 for value in NEAR]
    a = document(tmp_path / "a.json", result("x", NEAR, 1.0015, unit, larger=larger))
    b = document(tmp_path / "b.json", result("x", worse, 1.0015, unit, larger=larger))
    assert (report(a, b).verdict.kind, report(b, a).verdict.kind) == ("slower", "faster")


@pytest.mark.parametrize(("value", "bound", "fraction", "larger"), [(4.0, 2.0, 0.53, False), (2.0, 4.0, 0.47, True)])
def test_a_fraction_that_is_the_median_of_rounds_says_so_too(
    tmp_path: Path, value: float, bound: float, fraction: float, larger: bool
) -> None:
    figure = result("x", NEAR, value, "%", larger=larger) | {"bound": {"value": bound}, "fraction_of_bound": fraction}
    assert read_saved(document(tmp_path / "a.json", figure), "x").larger_is_better == larger


def test_counts_of_the_gate_are_better_when_smaller(tmp_path: Path) -> None:
    figure = {
        "name": "trainer step: operators",
        "value": 5,
        "unit": "",
        "samples": [5],
        "bound": None,
        "fraction_of_bound": None,
    }
    assert not read_saved(document(tmp_path / "a.json", figure, case="perf"), None).larger_is_better


def test_the_samples_of_a_figure_are_those_that_make_its_value(tmp_path: Path) -> None:
    """Not the first numbers in them: reading is not writing, and what is read faster is another result of the same samples."""
    samples = [
        {"redline": {"write_s": 9.0, "read_s": value}, "pickle": {"write_s": 1.0, "read_s": 2 * value}} for value in NEAR
    ]
    path = document(tmp_path / "a.json", result("1,024: read", samples, 1.0015, "s", larger=False))
    assert read_saved(path, None).samples == NEAR
    assert read_saved(path, "1,024: read").samples == NEAR
    assert read_saved(f"{path}#pickle", "1,024: read").samples == [2 * value for value in NEAR]
    assert read_saved(path, "1,024: read:write_s").samples == [9.0] * 10


def test_the_side_that_makes_the_value_need_not_be_the_first(tmp_path: Path) -> None:
    samples = [{"off": {"tokens_per_s": 50.0}, "auto": {"tokens_per_s": value}} for value in NEAR]
    path = document(tmp_path / "a.json", result("throughput", samples, 1.0015, "tok/s", larger=True))
    assert read_saved(path, None).samples == NEAR


def test_of_results_of_one_name_the_one_with_the_side_is_read(tmp_path: Path) -> None:
    ours = {"redline": {"tokens_per_s": 1.0}}
    both = [[ours | {peer: {"tokens_per_s": speed}}] * 8 for peer, speed in (("transformers", 0.5), ("vllm", 0.8))]
    path = document(tmp_path / "a.json", *(result("throughput", samples, 1.0, "tok/s", larger=True) for samples in both))
    assert read_saved(f"{path}#transformers", None).samples == [0.5] * 8
    assert read_saved(f"{path}#vllm", None).samples == [0.8] * 8


def test_a_rate_in_other_units_is_no_time(tmp_path: Path) -> None:
    samples = [{"ours": {"seconds": 1 / value, "bytes_per_s": 1e9 * value}} for value in NEAR]
    read = read_saved(document(tmp_path / "a.json", result("copy", samples, 1.0015, "GB/s", larger=True)), None)
    assert read.samples == [1e9 * value for value in NEAR]
    assert read.larger_is_better


def test_a_number_for_each_side_is_compared_by_the_side_that_is_named(tmp_path: Path) -> None:
    samples = [{"redline": 60 * value, "transformers": 30.0} for value in NEAR]
    figure = result("MFU", samples, 60 * 1.0015, "%", larger=True) | {"peer": {"name": "transformers"}}
    path = document(tmp_path / "a.json", figure)
    Path(path).write_text(
        Path(path).read_text().replace('"device"', '"warm_up": {"redline": {}, "transformers": {}}, "device"')
    )
    assert read_saved(path, None).samples == [60 * value for value in NEAR]
    verdict = report(f"{path}#transformers", f"{path}#redline", "MFU").verdict
    assert (verdict.kind, round(verdict.comparison.ratio)) == ("faster", 2)
    assert report(f"{path}#redline", f"{path}#transformers").verdict.exit_code == 1
    with pytest.raises(CompareError, match="have no side vllm") as refused:
        read_saved(f"{path}#vllm", "MFU")
    assert refused.value.hint == "name one of redline, transformers"


def test_a_figure_whose_samples_are_its_parts_is_their_sum(tmp_path: Path) -> None:
    samples = [{"redline": {"data": 0.1, "forward": value}, "peer": {"data": 0.2, "forward": 2 * value}} for value in NEAR]
    figure = result("step", samples, 1.1015, "s", larger=False) | {"parts": {"data": 0.1, "forward": 1.0015}}
    path = document(tmp_path / "a.json", figure)
    assert read_saved(path, None).samples == pytest.approx([0.1 + value for value in NEAR])
    assert read_saved(f"{path}#peer", "step:forward").samples == [2 * value for value in NEAR]
    verdict = report(f"{path}#peer", f"{path}#redline").verdict
    assert verdict.kind == "faster"
    assert verdict.comparison.ratio == pytest.approx(2)


def test_parts_of_a_figure_are_not_taken_for_it(tmp_path: Path) -> None:
    samples = [{"redline": {"data": 0.1, "forward": value}} for value in NEAR]
    path = document(tmp_path / "a.json", result("step", samples, 1.1015, "s", larger=False))
    with pytest.raises(CompareError, match="no positive number") as refused:
        read_saved(path, None)
    assert "with one of data, forward" in refused.value.hint
    assert read_saved(path, "step:forward").samples == NEAR


@pytest.mark.parametrize("samples", [[{"x": "much"}], [0.0], [None], [{"redline": {"nothing": "here"}}]])
def test_samples_without_a_number_are_refused(tmp_path: Path, samples: list[Any]) -> None:
    with pytest.raises(CompareError, match="no positive number"):
        read_saved(saved(tmp_path / "a.json", samples), None)


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    for path in (tmp_path / "a.json", tmp_path / "missing.json"):
        with pytest.raises(CompareError, match="not a saved result"):
            read_saved(str(path), None)
    with pytest.raises(CompareError, match="no result called"):
        read_saved(saved(tmp_path / "b.json", NEAR), "throughput")


def test_scores_of_models_are_not_compared_as_times(tmp_path: Path) -> None:
    path = saved(tmp_path / "eval.json", NEAR)
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | {"case": "eval"}))
    with pytest.raises(CompareError, match=r"(?s)scores, not times.*redline eval MODEL --against MODEL"):
        read_saved(path, None)


def test_a_result_against_itself_is_no_different(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.json", NEAR)
    assert report(path, path).verdict.kind == "no different"


def test_a_refusal_is_a_config_error() -> None:
    with pytest.raises(ConfigError), jobs("nowhere", "nowhere", What(case="trainer")):
        pass


def test_a_field_that_is_better_neither_way_is_refused(tmp_path: Path) -> None:
    samples = [{"step_s": value, "mean_tokens": value} for value in NEAR]
    path = saved(tmp_path / "a.json", samples, unit="s")
    assert not read_saved(path, "step:step_s").larger_is_better
    with pytest.raises(CompareError, match="whether more or less of mean_tokens is better"):
        read_saved(path, "step:mean_tokens")


def test_what_a_search_tried_is_no_sample(tmp_path: Path) -> None:
    samples = [{"side": "redline", "tokens": value, "fits": True} for value in NEAR]
    with pytest.raises(CompareError, match="found by a search"):
        read_saved(saved(tmp_path / "a.json", samples, unit="tokens"), "step:tokens")


@pytest.mark.parametrize(("side", "field"), [("#vllm", ""), ("", ":nonsense")])
def test_a_side_or_a_field_that_is_nowhere_is_refused(tmp_path: Path, side: str, field: str) -> None:
    path = saved(tmp_path / "a.json", NEAR, unit="s")
    with pytest.raises(CompareError):
        read_saved(f"{path}{side}", f"step{field}")
