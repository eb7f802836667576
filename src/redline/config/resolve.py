"""Fill what a recipe left to us, once, with the reason for each choice. Loads no torch."""

from __future__ import annotations

import difflib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from redline.config.algorithms import check_algorithm, fill_algorithm, recomputes_old_logprobs
from redline.config.engine_recipe import EngineRecipe
from redline.config.installation import how_to_install
from redline.config.paths import (
    is_adapter,
    is_run_folder,
    model_of_run,
    named_alike,
    run_of_checkpoint,
    runs_beside,
    with_absolute_paths,
)
from redline.config.processor import WHOLE_NUMBER_FLAGS, bfloat16_flags, multiplies_in
from redline.config.schema import Config
from redline.config.sections.engine import EngineConfig, RunEngineConfig
from redline.config.sections.model import ModelConfig
from redline.config.sections.run import RunConfig
from redline.config.sections.tasks import FileTask
from redline.config.sections.trainer import ScheduleConfig
from redline.errors import ConfigError

SINK_PACKAGES = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "prometheus": "prometheus_client",
    "opentelemetry": "opentelemetry.exporter.otlp.proto.http",
}
"""Sink → what its adapter imports; the extra has the sink's name."""
SLOW_BFLOAT16 = (
    "model.dtype = bfloat16: this CPU has no instructions for it; float32 may be many times faster (model.dtype=auto)"
)
SET_NONE = "set engine.quantization=none"
CHOOSE_BFLOAT16 = "choose bfloat16 as the dtype, or set engine.quantization=none"
MAX_ROWS = 1024
"""Rows that an engine has unasked, at most: 1,024 rows of logits over 152,000 tokens take 0.6 GB in float32."""
BUILTIN_MODELS = ("builtin:smollm2-135m-instruct", "builtin:small", "builtin:tiny")


@dataclass(slots=True, frozen=True)
class Resolved:
    """A config with nothing left open."""

    config: Config
    reasons: dict[str, str]
    """Key → why it has the value we chose."""
    warnings: tuple[str, ...] = ()
    """What was asked for and will disappoint, and what else a person may want to know."""

    @property
    def recorded(self) -> Config:
        """The config as the run folder keeps it. A fall until the run ends stays open there: a run that goes on may have more
        steps than it began with."""
        if "trainer.schedule.decay_steps" not in self.reasons:
            return self.config
        trainer = self.config.trainer
        schedule = trainer.schedule.model_copy(update={"decay_steps": None})
        return self.config.model_copy(update={"trainer": trainer.model_copy(update={"schedule": schedule})})


def resolve(config: Config) -> Resolved:
    """Replace every `auto`, fill in the algorithm, and refuse what cannot run here."""
    _check_paths(config)
    _check_sinks(config)
    config = with_absolute_paths(config)
    config, reasons = fill_algorithm(config)
    check_algorithm(config)
    run, model, of_machine, warnings = _of_machine(config.run, config.model)
    _check_quantization(config.engine, run.device, model.dtype)
    reasons |= of_machine
    recomputes, reasons["trainer.recompute_old_logprobs"] = recomputes_old_logprobs(
        config.trainer, model.dtype, config.engine.quantization
    )
    schedule, reasons["trainer.schedule.decay_steps"] = _schedule(config)
    trainer = config.trainer.model_copy(update={"recompute_old_logprobs": recomputes, "schedule": schedule})
    engine, reasons["engine.max_num_seqs"] = _engine(config)
    return Resolved(
        config.model_copy(update={"run": run, "model": model, "trainer": trainer, "engine": engine}),
        {k: v for k, v in reasons.items() if v},
        warnings,
    )


@dataclass(slots=True, frozen=True)
class ResolvedEngine:
    """A recipe of an engine alone, with nothing left open."""

    recipe: EngineRecipe
    warnings: tuple[str, ...] = ()
    """What was asked for and will disappoint."""


def resolve_engine(recipe: EngineRecipe) -> ResolvedEngine:
    """Replace every `auto`, and refuse what cannot run here."""
    _check_model(recipe.model.path)
    run, model, _, warnings = _of_machine(recipe.run, recipe.model)
    _check_quantization(recipe.engine, run.device, model.dtype)
    return ResolvedEngine(recipe.model_copy(update={"run": run, "model": model}), warnings)


def _of_machine(run: RunConfig, model: ModelConfig) -> tuple[RunConfig, ModelConfig, dict[str, str], tuple[str, ...]]:
    """Both sections with what this machine decides, the reasons by key, and warnings."""
    reasons: dict[str, str] = {}
    device, reasons["run.device"] = _device(run.device)
    dtype, reasons["model.dtype"] = _dtype(model.dtype, device)
    threads, reasons["run.num_threads"], too_many = _threads(run.num_threads)
    slow = device == "cpu" and dtype == "bfloat16" and not bfloat16_flags()
    return (
        run.model_copy(update={"device": device, "num_threads": threads}),
        model.model_copy(update={"dtype": dtype}),
        reasons,
        tuple(filter(None, [SLOW_BFLOAT16 if slow else "", too_many])),
    )


def _check_quantization(engine: EngineConfig, device: str, dtype: str) -> None:
    kind = engine.quantization
    if kind == "none":
        return
    if kind == "fp8":
        if device != "cuda":
            raise ConfigError(f"engine.quantization = fp8: it is for GPUs, and this is on {device}", SET_NONE)
        if dtype != "bfloat16":
            raise ConfigError(f"engine.quantization = fp8: the rest is in bfloat16, and the dtype is {dtype}", CHOOSE_BFLOAT16)
        return
    if device != "cpu":
        raise ConfigError(f"engine.quantization = {kind}: it is for CPUs, and this is on {device}", SET_NONE)
    if not multiplies_in(kind):
        flags = ", ".join(WHOLE_NUMBER_FLAGS[kind])
        raise ConfigError(f"engine.quantization = {kind}: this CPU has none of {flags}; it would be slower", SET_NONE)


def _check_paths(config: Config) -> None:
    _check_model(config.model.path)
    if config.rollouts.reward_model.path is not None:
        _check_reward_model(config.rollouts.reward_model.path)
    task = config.rollouts.task
    if task is None:
        return
    if task.kind == "file":
        _check_files(task)
        if task.answer_field is None and config.rollouts.environment.name is None and config.rollouts.reward_model.path is None:
            raise ConfigError(
                "rollouts.task.answer_field = null: nothing says what a reply is worth",
                "name the field of the right answers, or set rollouts.environment.name or rollouts.reward_model.path",
            )
    if task.kind == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("rollouts.task.kind = 'reasoning_gym': the package is not installed", how_to_install("demo"))


def _check_files(task: FileTask) -> None:
    if not os.path.exists(task.path):
        raise ConfigError(
            f"rollouts.task.path = {str(task.path)!r}: no such file or folder",
            named_alike(task.path) or "give a file with one JSON object per line, a Parquet file, or a folder of such files",
        )
    if task.extract == "math" and not _installed("math_verify"):
        raise ConfigError("rollouts.task.extract = 'math': the package math-verify is not installed", how_to_install("math"))


def _check_sinks(config: Config) -> None:
    for sink in config.telemetry.sinks:
        if not _installed(SINK_PACKAGES[sink]):
            raise ConfigError(
                f"telemetry.sinks has {sink!r}: the package {SINK_PACKAGES[sink]} is not installed",
                how_to_install(sink),
            )


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package above it
        return False


def _check_model(path: str) -> None:
    if path.startswith("builtin:"):
        if path not in BUILTIN_MODELS:
            raise ConfigError(f"model.path = {path!r}: no such built-in model", f"one of {', '.join(BUILTIN_MODELS)}")
        return
    local = Path(path).expanduser()
    if is_run_folder(local):
        model_of_run(local)
    elif os.path.isdir(local):
        if not (local / "config.json").is_file() and not is_adapter(local):
            raise ConfigError(f"model.path = {path!r}: the folder has no config.json", _model_near(local))
    elif path.endswith(".gguf"):
        if not os.path.isfile(local):
            raise ConfigError(f"model.path = {path!r}: no such file", named_alike(local) or "give the path of a .gguf file")
    elif os.path.isfile(local):
        raise ConfigError(f"model.path = {path!r}: a file, and no .gguf file", "give a Hugging Face folder, or a .gguf file")
    elif runs := runs_beside(local):  # nobody on the hub is called as a folder of runs is
        near = difflib.get_close_matches(local.name, runs, n=1) or runs[-1:]
        raise ConfigError(f"model.path = {path!r}: no such run", f"did you mean {local.parent / near[0]}?")
    elif not _may_be_hub_id(path):
        raise ConfigError(
            f"model.path = {path!r}: no such folder",
            named_alike(local)
            or "give a Hugging Face folder, a .gguf file, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or "
            + " or ".join(BUILTIN_MODELS),
        )


def _model_near(folder: Path) -> str:
    """Where the model may be that a folder without one was given for."""
    if run_of_checkpoint(folder):
        return f"make a model of it: redline export {folder}"
    if is_run_folder(folder.parent):
        return f"give the run's folder: {folder.parent}"
    runs = runs_beside(folder / "any")
    return f"it has runs; give one of them, such as {folder / runs[-1]}" if runs else "give a Hugging Face model folder"


def _check_reward_model(path: str) -> None:
    folder = Path(path).expanduser()
    if not os.path.isfile(folder / "config.json") and (os.path.exists(folder) or not _may_be_hub_id(path)):
        raise ConfigError(
            f"rollouts.reward_model.path = {path!r}: no such model folder",
            "give a Hugging Face folder or hub id of a sequence classifier with one label",
        )


def _may_be_hub_id(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def _schedule(config: Config) -> tuple[ScheduleConfig, str]:
    """The schedule with the steps of its fall, and why there are so many where the recipe left them open."""
    schedule = config.trainer.schedule
    if schedule.kind == "constant" or schedule.decay_steps is not None:
        return schedule, ""
    steps = max(1, config.run.steps - schedule.warmup_steps)
    return schedule.model_copy(update={"decay_steps": steps}), "until run.steps"


def _engine(config: Config) -> tuple[RunEngineConfig, str]:
    """The engine section with a row for each attempt that an engine has of a step, and why, where the recipe leaves their
    number open: with fewer, the rest would be sampled in a second wave, whose steps cost almost as much as the first one's."""
    engine, engines = config.engine, max(1, config.placement.engines)
    rows = max(config.rollouts.group_size, min(MAX_ROWS, -(-config.sequences_per_step // engines)))
    if not config.leaves_rows_open or rows <= engine.max_num_seqs:
        return engine, ""
    return engine.model_copy(update={"max_num_seqs": rows}), "auto: the attempts of a step"


def _device(asked: str) -> tuple[str, str]:
    present = Path("/dev/nvidiactl").exists()
    if asked == "cuda" and not present:
        raise ConfigError("run.device = 'cuda': no NVIDIA device is visible here", "set run.device=cpu, or expose the device")
    if asked != "auto":
        return asked, ""
    return ("cuda", "auto: an NVIDIA device is present") if present else ("cpu", "auto: no NVIDIA device is present")


def _dtype(asked: str, device: str) -> tuple[str, str]:
    if asked != "auto":
        return asked, ""
    if device == "cuda":
        return "bfloat16", "auto: CUDA device"
    found = bfloat16_flags()
    return (
        ("bfloat16", f"auto: this CPU has {found[0]}") if found else ("float32", "auto: this CPU has no bfloat16 instructions")
    )


def _threads(asked: int | None) -> tuple[int, str, str]:
    """How many, why, and a warning where that is fewer than were asked for: more than there are cores only get in each other's
    way, and thousands end the process."""
    number, why = (asked, "") if asked else _own_threads()
    cores = os.cpu_count() or 1
    if number <= cores:
        return number, why, ""
    return cores, f"all cores, not {number:,}", f"run.num_threads = {number}: this machine has {cores} cores, and uses {cores}"


def _own_threads() -> tuple[int, str]:
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list has a number for each level of nesting
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted), "auto: OMP_NUM_THREADS"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return cores, "auto: cores this process may use"
