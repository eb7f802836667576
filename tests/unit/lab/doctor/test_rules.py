"""Every cause, planted in the figures of a healthy run: the doctor names it first, and finds nothing in the healthy one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from redline.engine.native.speculation.replay import Replayed
from redline.lab.doctor.doctor import RULES, Diagnosis, examined
from redline.lab.doctor.facts import Facts
from redline.lab.doctor.finding import Abstention, Finding
from redline.lab.doctor.guesses import Guesses, Pair
from redline.lab.doctor.text import lines_of
from redline.runs.verdict import Bound
from redline.telemetry.ledger import LaneLedger, Ledger

STEPS = 12
RECIPE: dict[str, Any] = {
    "run": {"device": "cpu", "checkpoint_every": 10},
    "rollouts": {"groups_per_step": 8, "group_size": 8, "environment": {"name": None, "workers": 8}},
    "engine": {"max_num_seqs": 256, "enable_prefix_caching": True, "gpu_memory_utilization": 0.5, "options": {}},
    "trainer": {"gradient_checkpointing": "none", "mini_batches": 1, "epochs": 1, "recompute_old_logprobs": "auto"},
    "buffer": {"max_lag": 0},
    "placement": {"engines": 0, "transport": "auto"},
}
LOCKSTEP = {
    "run/step_s": 1.0,
    "timeline/generation_s": 0.5,
    "timeline/training_s": 0.48,
    "timeline/data_s": 0.005,
    "timeline/unaccounted_s": 0.015,
    "rollouts/attempts": 64,
    "rollouts/failures": 0,
    "rollouts/retries": 0,
    "rollouts/attempt_latency_p50_s": 0.4,
    "rollouts/attempt_latency_p99_s": 0.5,
    "engine/queue_p50_s": 0.001,
    "engine/batch_size_mean": 60,
    "engine/prefill_s": 0.05,
    "engine/preemptions": 0,
    "engine/kv_use_peak": 0.5,
    "engine/prompt_tokens": 4000,
    "trainer/micro_batches": 4,
    "trainer/tokens": 16_000,
    "trainer/forward_s": 0.15,
    "trainer/backward_s": 0.3,
    "trainer/optimizer_s": 0.02,
    "trainer/mismatch_kl": 1e-7,
    "weight_sync/total_s": 0.001,
}
BESIDE = {
    **LOCKSTEP,
    "timeline/generation_s": 0.0,
    "timeline/training_s": 0.97,
    "timeline/wait_for_rollouts_s": 0.01,
    "timeline_rollouts/generation_s": 0.97,
    "timeline_rollouts/wait_for_budget_s": 0.02,
    "buffer/groups_to_score": 0.1,
}
QUIET = {
    "host/machine_cpu_percent": 95.0,
    "host/cpu_percent": 185.0,
    "host/children_cpu_percent": 0.0,
    "host/total_bytes": 24e9,
    "host/available_bytes": 20e9,
}
GPU = {
    "gpu/0/utilization_percent": 95.0,
    "gpu/0/memory_total_bytes": 140e9,
    "gpu/0/memory_used_bytes": 100e9,
    "gpu/0/sm_clock_mhz": 1900.0,
    "gpu/0/temperature_c": 60.0,
    "gpu/0/power_w": 500.0,
    "gpu/0/power_limit_w": 700.0,
    "memory/weights_bytes": 1e9,
    "memory/peak_bytes": 60e9,
    "memory/offloaded_bytes": 0.0,
}


def facts(
    steps: Mapping[str, float] = LOCKSTEP,
    keys: Mapping[str, Any] | None = None,
    samples: Mapping[str, Any] = QUIET,
    spans: Mapping[str, float] | None = None,
    first_s: float = 1.1,
) -> Facts:
    """A run of steps that are alike but for 2% of noise."""
    noise = 1 + 0.02 * np.random.default_rng(0).standard_normal(STEPS)
    config = {name: dict(section) for name, section in RECIPE.items()}
    for key, value in (keys or {}).items():
        *path, last = key.split(".")
        section = config
        for part in path:
            section[part] = section = dict(section.get(part) or {})
        section[last] = value
    rows = {name: round(seconds * 1e9) for name, seconds in (spans or {}).items()}
    main = LaneLedger(sum(rows.values()), rows, 0)
    return Facts(
        config=config,
        steps={name: value * noise for name, value in steps.items()},
        first={"run/step_s": np.array([first_s, 1.0])},
        samples=columns(samples),
        ledger=Ledger({"main": main}),
        environment={"cpu": {"usable_cores": 2}},
    )


def columns(samples: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.atleast_1d(np.asarray(value, float)) for name, value in samples.items()}


def spiked() -> Facts:
    """Memory runs out in every third step, which then takes twice as long."""
    found = facts(LOCKSTEP)
    third = np.arange(STEPS) % 3 == 0
    longer = {name: found.steps[name] + 0.5 * third for name in ("run/step_s", "timeline/training_s")}
    return replace(found, steps={**found.steps, **longer, "trainer/oom_retries": np.where(third, 1.0, np.nan)})


def guessed(likely_s: float, careful_s: float) -> Facts:
    """A run of which three steps were replayed: 1 s each without guesses."""
    plain = Replayed(seconds=1.0, tokens=1000, steps=200, rows=1000)
    likely, careful = (
        [Pair(plain, Replayed(seconds, 1000, 80, rows=400, drafted=800, accepted=600))] * 3 for seconds in (likely_s, careful_s)
    )
    return replace(facts(), guesses=Guesses(likely, careful, num_attempts=96, rows=5.0, plain_s=0.005))


CUDA = {"run.device": "cuda"}
ON_GPU = {**QUIET, **GPU}
PLANTED: dict[str, Facts] = {
    "slow_reward": facts({**LOCKSTEP, "timeline/reward_s": 0.4}),
    "slow_reward with a lag": facts(
        {
            **BESIDE,
            "timeline/wait_for_rollouts_s": 0.5,
            "timeline_rollouts/wait_for_budget_s": 0.5,
            "buffer/groups_to_score": 9,
        },
        {"buffer.max_lag": 1},
    ),
    "slow_reward that leaves the engine without requests": facts(
        {
            **BESIDE,
            "timeline/wait_for_rollouts_s": 0.5,
            "timeline_rollouts/wait_for_requests_s": 0.45,
            "buffer/groups_to_score": 3,
        },
        {"buffer.max_lag": 1},
    ),
    "serial_episodes": facts(
        {**LOCKSTEP, "timeline/wait_for_environments_s": 0.4},
        {"rollouts.environment.name": "calculator", "rollouts.environment.run_in": "processes"},
    ),
    "retokenising": facts(
        {**LOCKSTEP, "rollouts/turns_mean": 5, "engine/prefill_s": 0.3},
        {"rollouts.environment.name": "calculator", "rollouts.environment.keep_replies": False},
    ),
    "loading_stall": facts({**LOCKSTEP, "timeline/data_s": 0.3}),
    "failed_attempts": facts({**LOCKSTEP, "rollouts/failures": 20}),
    "low_concurrency": facts({**LOCKSTEP, "engine/queue_p50_s": 0.2, "engine/batch_size_mean": 8}, {"engine.max_num_seqs": 8}),
    "prefix_cache_off": facts(
        {**LOCKSTEP, "engine/prefill_s": 0.3, "rollouts/turns_mean": 5}, {"engine.enable_prefix_caching": False}
    ),
    "preemption": facts({**LOCKSTEP, "engine/preemptions": 30, "engine/kv_use_peak": 1.0}),
    "kv_cache_too_small": facts(
        {**LOCKSTEP, "engine/kv_use_peak": 1.0, "engine/batch_size_mean": 20, "engine/queue_p50_s": 0.2}
    ),
    "kv_cache_too_large": facts(
        {**LOCKSTEP, "engine/kv_use_peak": 0.1},
        {**CUDA, "trainer.gradient_checkpointing": "full"},
        {**ON_GPU, "gpu/0/memory_used_bytes": 130e9},
    ),
    "too_much_tensor_parallelism": facts(LOCKSTEP, {**CUDA, "engine.options.tensor_parallel_size": 4}, ON_GPU),
    "speculation_off": guessed(0.5, 0.7),
    "micro_batch_too_small": facts(
        {**LOCKSTEP, "trainer/micro_batches": 64, "trainer/tokens": 4000}, {"trainer.max_tokens_per_micro_batch": 64}
    ),
    "checkpointing_not_needed": facts(LOCKSTEP, {"trainer.gradient_checkpointing": "full"}),
    "offload_not_needed": facts(
        {**LOCKSTEP, "trainer/optimizer_s": 0.2},
        {**CUDA, "trainer.offload_optimizer": True},
        {**ON_GPU, "memory/offloaded_bytes": 4e9},
    ),
    "double_forward": facts({**LOCKSTEP, "trainer/recompute_s": 0.15}, {"trainer.mini_batches": 4}),
    "imbalance": facts({**LOCKSTEP, "trainer/rank_imbalance": 1.8}),
    "long_tail": facts({**LOCKSTEP, "rollouts/attempt_latency_p99_s": 2.0, "engine/batch_size_mean": 12}),
    "no_overlap": facts(LOCKSTEP, {**CUDA, "placement.engines": 1}, ON_GPU),
    "no_overlap with environments": facts(
        {**LOCKSTEP, "timeline/wait_for_environments_s": 0.4},
        {"rollouts.environment.name": "web", "rollouts.environment.workers": 64},
    ),
    "io_bound": facts({**LOCKSTEP, "run/between_s": 0.3}),
    "frequent_evaluation": facts(
        {**LOCKSTEP, "run/between_s": 0.3, "run/evaluation_s": 0.3}, {"rollouts.evaluation": {"every": 1}}
    ),
    "memory_spike": spiked(),
    "staleness_waits": facts(
        {**BESIDE, "timeline/wait_for_rollouts_s": 0.3, "timeline_rollouts/wait_for_budget_s": 0.3}, {"buffer.max_lag": 1}
    ),
    "staleness_waits with environments": facts(
        {**BESIDE, "timeline/wait_for_rollouts_s": 0.5, "timeline_rollouts/wait_for_environments_s": 0.5},
        {"buffer.max_lag": 1, "rollouts.environment.name": "web", "rollouts.environment.workers": 64},
    ),
    "sync_stall": facts({**LOCKSTEP, "timeline/weight_sync_s": 0.25}),
    "serialisation": facts({**LOCKSTEP, "timeline/data_s": 0.15}, spans={"buffer.pack": 0.15 * STEPS}),
    "slow_first_step": facts(first_s=9.0),
    "noisy_neighbour": facts(samples={**QUIET, "host/cpu_percent": 80.0, "host/core_wait_percent": 50.0}),
    "noisy_neighbour of a kernel that counts no waits": facts(samples={**QUIET, "host/cpu_percent": 80.0}),
    "cpu_bound": facts(
        LOCKSTEP,
        CUDA,
        {**ON_GPU, "gpu/0/utilization_percent": 35.0, "host/cpu_percent": 100.0, "host/machine_cpu_percent": 50.0},
    ),
    "noisy_neighbour on another machine": replace(
        facts(), hosts={"node-7": columns({**QUIET, "host/cpu_percent": 80.0, "host/core_wait_percent": 50.0})}
    ),
    "throttling of another machine's GPU": replace(
        facts(LOCKSTEP, CUDA, ON_GPU),
        hosts={"node-7": columns({**QUIET, "gpu/3/sm_clock_mhz": [1900, 1300, 1250, 1250], "gpu/3/temperature_c": 90.0})},
    ),
    "throttling": facts(
        LOCKSTEP, CUDA, {**ON_GPU, "gpu/0/sm_clock_mhz": [1900, 1300, 1250, 1250], "gpu/0/temperature_c": 90.0}
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_the_first_finding(name: str) -> None:
    findings, _ = examined(PLANTED[name])
    assert [finding.cause for finding in findings][:1] == [name.split()[0]]


def test_every_rule_has_a_planted_cause() -> None:
    assert {name.split()[0] for name in PLANTED} == set(RULES)


@pytest.mark.parametrize(
    "healthy",
    [facts(), facts(LOCKSTEP, CUDA, ON_GPU), facts(BESIDE, {"buffer.max_lag": 1})],
    ids=["lockstep", "on a GPU", "with a lag"],
)
def test_a_healthy_run_gets_no_finding(healthy: Facts) -> None:
    assert examined(healthy)[0] == ()


@pytest.mark.parametrize("name", PLANTED)
def test_a_gain_is_an_interval_within_the_recorded_time_and_a_change_is_written_as_an_override(name: str) -> None:
    for finding in examined(PLANTED[name])[0]:
        gain = finding.gain
        assert 0 <= gain.low_s <= gain.likely_s <= gain.high_s <= PLANTED[name].wall_s * 1.001
        assert gain.assumption
        assert finding.evidence
        assert all("=" in override for override in finding.overrides)


def test_guesses_gain_what_the_replay_says_of_the_time_without_prompts() -> None:
    found = RULES["speculation_off"](guessed(0.5, 0.7))
    assert isinstance(found, Finding)
    decoding = (0.5 - 0.05) * STEPS
    assert found.gain.likely_s == pytest.approx(0.5 * decoding, rel=0.02)
    assert found.gain.low_s == pytest.approx(0.3 * decoding, rel=0.04)
    assert "75% of the guesses" in found.title


@pytest.mark.parametrize("likely_s", [0.85, 1.02])
def test_guesses_that_pay_little_are_not_proposed(likely_s: float) -> None:
    assert RULES["speculation_off"](guessed(likely_s, likely_s)) is None


def test_guesses_that_may_not_pay_gain_nothing_at_least() -> None:
    found = RULES["speculation_off"](guessed(0.5, 1.02))
    assert isinstance(found, Finding)
    assert found.gain.low_s == 0


def test_on_the_side_that_waits_nothing_is_gained() -> None:
    """With a lag the trainer bounds this run; a slower reward is hidden behind it."""
    waits = {
        **BESIDE,
        "timeline_rollouts/wait_for_budget_s": 0.5,
        "timeline_rollouts/reward_s": 0.3,
        "timeline/wait_for_rollouts_s": 0,
    }
    found = RULES["slow_reward"](facts(waits, {"buffer.max_lag": 1}))
    assert isinstance(found, Finding)
    assert found.gain.likely_s == 0


def test_what_was_not_recorded_is_said() -> None:
    unsampled = facts(LOCKSTEP, {**CUDA, "trainer.offload_optimizer": True}, {})
    assert {"noisy_neighbour", "throttling", "cpu_bound", "offload_not_needed"} <= {
        answer.cause for answer in examined(unsampled)[1] if isinstance(answer, Abstention)
    }


@pytest.mark.parametrize(("every", "advice"), [(0, "telemetry.sample_every_s=1 does"), (1.0, "steady steps that take longer")])
def test_a_run_that_asked_for_samples_is_not_told_to_ask_for_them(every: float, advice: str) -> None:
    answer = RULES["noisy_neighbour"](facts(LOCKSTEP, {"telemetry.sample_every_s": every}, {}))
    assert isinstance(answer, Abstention)
    assert advice in answer.why


def test_what_lies_between_steps_is_not_to_be_proven_by_a_comparison_of_steps() -> None:
    found = examined(PLANTED["frequent_evaluation"])[0][0]
    assert found.change
    assert found.proof("runs/demo-001") == ""
    diagnosis = Diagnosis("runs/demo-001", Bound("bound by it", ()), (found,), (), wall_s=10.0, num_steps=STEPS)
    assert "prove: with a second run" in "\n".join(lines_of(diagnosis))


def test_prompts_of_engines_apart_are_not_taken_for_free() -> None:
    apart = {"engine.enable_prefix_caching": False, "placement.engines": 1}
    turns = facts({**LOCKSTEP, "engine/prefill_s": 0.0, "rollouts/turns_mean": 5}, apart)
    assert isinstance(RULES["prefix_cache_off"](turns), Abstention)


def test_findings_together_never_save_more_than_there_is() -> None:
    """Many causes that all claim the same time of generation."""
    worst = facts(
        {
            **LOCKSTEP,
            "engine/queue_p50_s": 0.2,
            "engine/batch_size_mean": 8,
            "engine/kv_use_peak": 1.0,
            "rollouts/failures": 30,
            "rollouts/attempt_latency_p99_s": 2.0,
            "engine/prefill_s": 0.3,
            "rollouts/turns_mean": 5,
        },
        {
            "engine.max_num_seqs": 32,
            "engine.enable_prefix_caching": False,
            "rollouts.environment.name": "x",
            "rollouts.environment.keep_replies": False,
        },
    )
    findings, _ = examined(worst)
    of_generation = [finding.gain.likely_s for finding in findings if finding.gain.of == "generation"]
    assert len(of_generation) > 1
    assert sum(of_generation) <= worst.phase("generation").sum()
    assert sum(finding.gain.likely_s for finding in findings) <= worst.wall_s


def test_rows_are_counted_for_each_engine_and_every_step_of_lag() -> None:
    """Four engines that decode sixteen rows each have no room left, and a lag of three fills as many rows four times."""
    full = facts({**LOCKSTEP, "engine/batch_size_mean": 16, "rollouts/attempt_latency_p99_s": 0.9}, {"placement.engines": 4})
    assert "long_tail" not in {finding.cause for finding in examined(full)[0]}
    waits = {**BESIDE, "timeline/wait_for_rollouts_s": 0.5, "timeline/training_s": 0.47, "engine/queue_p50_s": 0.3}
    short = facts(waits, {"buffer.max_lag": 3, "engine.max_num_seqs": 64})
    assert "low_concurrency" in {finding.cause for finding in examined(short)[0]}


def test_a_slow_reward_model_is_not_given_more_threads_and_a_task_of_ones_own_gets_processes() -> None:
    slow = {**LOCKSTEP, "timeline/reward_s": 0.4}
    judged = RULES["slow_reward"](facts(slow, {"rollouts.reward_model.path": "judge"}))
    own = RULES["slow_reward"](facts(slow, {"rollouts.task.kind": "import"}))
    assert isinstance(judged, Finding)
    assert isinstance(own, Finding)
    assert list(judged.change) == ["rollouts.reward_model.max_tokens_per_batch"]
    assert own.change["rollouts.reward_run_in"] == "processes"


def test_what_only_the_first_step_took_to_store_is_no_cost_of_the_others() -> None:
    assert RULES["serialisation"](facts({**LOCKSTEP, "timeline/data_s": 0.01}, spans={"buffer.store": 3.0})) is None


def test_the_proof_of_a_bound_host_changes_no_batch() -> None:
    keys = {**CUDA, "trainer.max_tokens_per_micro_batch": 1024}
    samples = {**ON_GPU, "gpu/0/utilization_percent": 35.0, "host/cpu_percent": 100.0}
    found = RULES["cpu_bound"](facts(LOCKSTEP, keys, samples))
    assert isinstance(found, Finding)
    assert found.change == {"trainer.max_tokens_per_micro_batch": 4096}


def test_what_happens_on_another_machine_is_said_with_its_name() -> None:
    [neighbour] = examined(PLANTED["noisy_neighbour on another machine"])[0]
    [throttled] = examined(PLANTED["throttling of another machine's GPU"])[0]
    assert neighbour.title == "Other processes take 55% of node-7."
    assert throttled.title == "The clock of GPU 3 of node-7 is 25% below what it reaches."
    assert neighbour.gain.low_s == 0, "whether the run waits for that machine is not known"


def test_the_runs_own_processes_on_another_machine_are_no_neighbours() -> None:
    own = {"host/machine_cpu_percent": 95.0, "host/cpu_percent": 400.0, "host/children_cpu_percent": 1100.0, "host/cores": 16.0}
    there = columns({**own, "host/core_wait_percent": 50.0})
    assert "noisy_neighbour" not in {finding.cause for finding in examined(replace(facts(), hosts={"node-7": there}))[0]}


def test_a_neighbour_on_a_core_of_its_own_costs_nothing() -> None:
    beside = {**QUIET, "host/cpu_percent": 95.0, "host/core_wait_percent": 0.5}
    assert "noisy_neighbour" not in {finding.cause for finding in examined(facts(samples=beside))[0]}
