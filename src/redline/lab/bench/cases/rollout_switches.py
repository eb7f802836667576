"""`redline bench rollout environment=NAME`: whole rollouts without a trainer, and what each thing that makes them fast gains.

In every round the tasks of one step are attempted by all arms, in an order drawn by lot: with everything on, with everything
off, and with each thing off by itself. The gain of a thing is the time per turn without it over the time per turn with
everything on, from pairs. An arm that took another number of turns, or turns of another length, did other work: the result says
so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from redline.config import Config, resolve, validate
from redline.config.sections.engine import ServedEngineConfig
from redline.engine import NativeEngine
from redline.engine.native.lora import make_bank
from redline.environments.states import write_states
from redline.lab.bench.cases.rollout_arms import (
    ADAPTER,
    ASYNC,
    BROKER,
    OFF,
    ON,
    PREFIX,
    ROLES,
    STATE_CACHE,
    SWITCHES,
    WARM_UP_PHASES,
    Arm,
    ArmRun,
    Switch,
)
from redline.lab.bench.settings import RolloutSettings
from redline.lab.environments.made import Made
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import Comparison, compare
from redline.lab.material.random_folders import as_path
from redline.lab.material.switched_engine import SwitchedEngine
from redline.lab.measure.machine import measure_machine
from redline.lab.measure.pairs import interleave
from redline.launch.engines import refuse_other_kinds
from redline.launch.models import load_policy
from redline.models.decoder import Decoder
from redline.models.lora.peft import tensor_name, write_adapter
from redline.models.sizes.flops import NetworkCost
from redline.telemetry.console.tables import Fitted

SINGLE_TURN = "single-turn"
LETTERS = {"kind": "import", "path": "redline.lab.material.tasks:Letters"}
SAME_WORK = 0.1
"""Turns and tokens per turn of two arms may differ by this share."""
STATES = 64
"""Positions in the file of states."""


def measure(settings: RolloutSettings, console: Console) -> Measured:
    """Measure every arm. Blocks for minutes."""
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    with (
        TemporaryDirectory(prefix="redline-bench-") as folder,
        as_path(settings.model, device, dtype, settings.seed, settings.tokenizer or "tiny") as path,
    ):
        stage = Stage(settings, path, Path(folder))
        used = settings.model_copy(update={"engine": stage.config.engine})
        rounds = stage.run_all(console)
        return Measured(used, stage.results(rounds, console))


class Stage:
    """A model, an engine, and the arms that use them."""

    def __init__(self, settings: RolloutSettings, path: str, folder: Path) -> None:
        self._settings, self._path, self._folder = settings, path, folder
        assert settings.environment is not None
        self.switches = self._applicable(settings.environment)
        self._states = self._make_states()
        self.config = self._config(())
        self._model = load_policy(self.config)
        decoder = self._model.decoder
        assert isinstance(decoder, Decoder), "a model of ours"
        adapter = self._write_adapter(decoder, settings.adapter_rank) if settings.adapter_rank else None
        self._engines = {caching: self._make_engine(decoder, caching=caching, adapter=adapter) for caching in (True, False)}

    def _applicable(self, environment: str) -> tuple[Switch, ...]:
        adapter = (ADAPTER,) if self._settings.adapter_rank else ()
        every = (*SWITCHES.get(environment, ()), ASYNC, BROKER, PREFIX, *adapter)
        wanted = self._settings.without
        return every if wanted is None else tuple(switch for switch in every if switch.name.replace(" ", "-") in wanted)

    def _make_states(self) -> Path | None:
        if STATE_CACHE not in self.switches:
            return None
        path = self._folder / "states.bin"
        environment: Any = Made(str(self._settings.environment), {"warm_up": WARM_UP_PHASES}, self._settings.seed).make()
        write_states(path, environment, STATES, seed=self._settings.seed)
        return path

    def _config(self, off: Sequence[Switch]) -> Config:
        settings = self._settings
        params: dict[str, Any] = dict(settings.params)
        for switch in self.switches:
            params |= switch.off if switch in off else switch.on
        if self._states is not None and STATE_CACHE not in off:
            params["states"] = str(self._states)
        sizes = settings.model_dump(include={"groups_per_step", "group_size", "max_new_tokens"})
        name = settings.environment
        played = {"name": name, "params": params, "timeout_s": None, "retries": 0}
        rollouts = {"task": LETTERS} if name == SINGLE_TURN else {"environment": played}
        rows = settings.groups_per_step * settings.group_size * ROLES.get(str(name), 1)
        engine = settings.engine.model_dump(exclude_unset=True)
        recipe = {
            "run": {"device": settings.device, "num_threads": settings.num_threads, "seed": settings.seed},
            "model": {"path": self._path, "dtype": settings.dtype},
            "rollouts": {
                **rollouts,
                **sizes,
                "advantages": "group_centred" if settings.group_size > 1 else "batch",
                "evaluation": {"num_tasks": 0},
            },
            "engine": {"max_num_seqs": min(rows, settings.max_rows), **engine},
        }
        return resolve(validate(recipe, "redline bench rollout")).config

    def _make_engine(self, decoder: Decoder, *, caching: bool, adapter: Path | None) -> SwitchedEngine:
        """One of the two engines, which share the weights. The first to be made leaves memory for the other."""
        rank, engine = self._settings.adapter_rank, self.config.engine
        refuse_other_kinds(engine)
        share = engine.gpu_memory_utilization / (2 if caching else 1)
        config = engine.model_copy(update={"enable_prefix_caching": caching, "gpu_memory_utilization": share})
        loras = {"max_loras": 1, "max_lora_rank": rank} if rank else {"max_loras": 0}
        bank = make_bank(decoder, ServedEngineConfig.model_validate({**config.model_dump(), **loras}))
        return SwitchedEngine(NativeEngine(decoder, config, self._model.tokenizer, bank=bank), adapter=adapter)

    def _write_adapter(self, decoder: Decoder, rank: int) -> Path:
        spec, targets = decoder.spec, ("q_proj", "v_proj")
        out = {"q_proj": spec.num_heads * spec.head_dim, "v_proj": spec.num_kv_heads * spec.head_dim}
        tensors = {}
        for layer in range(spec.num_layers):
            for target in targets:
                tensors[tensor_name(layer, target, "A")] = torch.full((rank, spec.hidden_size), 1e-3)
                tensors[tensor_name(layer, target, "B")] = torch.full((out[target], rank), 1e-3)
        folder = self._folder / "adapter"
        write_adapter(folder, tensors, rank=rank, alpha=rank, use_rslora=False, targets=targets, base=self._path)
        return folder

    def arms(self) -> dict[str, Sequence[Switch]]:
        """Name of an arm → what is off in it."""
        singly = {f"without {switch.name}": (switch,) for switch in self.switches}
        return {ON: (), **(singly if len(self.switches) > 1 else {}), OFF: self.switches}

    def run_all(self, console: Console) -> list[dict[str, ArmRun]]:
        with self._opened() as arms:
            for name in (ON, ON):
                arms[name].run(0)  # what is compiled, allocated or read once

            def tell(number: int, row: Mapping[str, ArmRun]) -> None:
                said = ", ".join(f"{name} {run.seconds:.2f} s" for name, run in row.items())
                console.print(f"round {number + 1}/{self._settings.pairs}: {said}", style="dim", soft_wrap=True)

            sides: dict[str, Callable[[int], ArmRun]] = {name: _later(arm) for name, arm in arms.items()}
            return interleave(sides, self._settings.pairs, self._settings.seed, tell)

    @contextmanager
    def _opened(self) -> Iterator[dict[str, Arm]]:
        arms: dict[str, Arm] = {}
        try:
            for name, off in self.arms().items():
                engine = replace(self._engines[PREFIX not in off], singly=BROKER in off)
                arms[name] = Arm(self._config(off), self._model, engine, off)
            yield arms
        finally:
            for arm in arms.values():
                arm.close()

    # ── results ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def results(self, rounds: Sequence[Mapping[str, ArmRun]], console: Console) -> list[Result]:
        console.print(Fitted(_table(rounds)))
        fastest = self._fastest(rounds)
        names = [name for name in rounds[0] if name != ON]
        throughput = [row[ON].new_tokens / row[ON].seconds for row in rounds]
        return [
            *(self._gain(name, rounds, fastest) for name in reversed(names)),
            Result("tokens, all on", statistics.median(throughput), "tok/s", [asdict(row[ON]) for row in rounds], fastest),
        ]

    def _gain(self, name: str, rounds: Sequence[Mapping[str, ArmRun]], fastest: Bound) -> Result:
        comparison = compare([row[name].s_per_turn for row in rounds], [row[ON].s_per_turn for row in rounds])
        by_cpu = compare([row[name].cpu_s_per_turn for row in rounds], [row[ON].cpu_s_per_turn for row in rounds])
        without = statistics.median(row[name].seconds for row in rounds)
        least = statistics.median(row[ON].new_tokens for row in rounds) / fastest.value
        what = next((switch.what for switch in self.switches if name.endswith(switch.name)), "everything is off")
        return Result(
            f"gain of {'everything' if name == OFF else name.removeprefix('without ')}",
            comparison.ratio,
            "×",
            [{ON: asdict(row[ON]), name: asdict(row[name])} for row in rounds],
            Bound(without / least, f"{without:.3g} s against the tokens of a round at the fastest this machine allows"),
            PeerFigure(ON, 1.0, comparison.ratio, comparison),
            details={
                "beside": f"{beside(what, name, rounds)}; by CPU time {_said(by_cpu)}",
                "interval_95": comparison.interval,
                "cpu_time": {"ratio": by_cpu.ratio, "interval_95": by_cpu.interval},
                "pairs": comparison.pairs,
            },
        )

    def _fastest(self, rounds: Sequence[Mapping[str, ArmRun]]) -> Bound:
        """Tokens per second where the engine alone works: bytes of the weights for each step, at the mean batch."""
        device = torch.device(self._settings.device)
        machine = measure_machine(device, getattr(torch, self._settings.dtype))
        dtype = getattr(torch, self._settings.dtype)
        cost = NetworkCost.of(self._model.decoder).quantized(self.config.engine.quantization, dtype)
        rows = self.config.engine.max_num_seqs
        weights = cost.weight_bytes(rows)
        step_s = weights / machine.bandwidth
        why = f"{rows} rows in each step, which reads {weights / 1e9:.3g} GB of weights; {machine.how}"
        return Bound(rows / step_s, why)


def beside(what: str, name: str, rounds: Sequence[Mapping[str, ArmRun]]) -> str:
    """What the arm does instead, its figures, and whether it did the same work."""
    runs = [row[name] for row in rounds]
    turns = [row[name].turns / max(1, row[ON].turns) for row in rounds]
    tokens = [row[name].tokens_per_turn / max(1, row[ON].tokens_per_turn) for row in rounds]
    differs = [
        f"{100 * (statistics.median(ratios) - 1):+.0f}% {label}"
        for label, ratios in (("turns", turns), ("tokens per turn", tokens))
        if abs(statistics.median(ratios) - 1) > SAME_WORK
    ]
    figures = (
        f"{_median(runs, 'seconds'):.2f} s, batch {_median(runs, 'mean_batch'):.1f},"
        f" {_median(runs, 'computed_prompt_tokens'):,.0f} prompt tokens computed"
    )
    return f"{what}: {figures}" + (f"; other work: {', '.join(differs)}" if differs else "")


def _said(comparison: Comparison) -> str:
    interval = comparison.interval
    return f"{comparison.ratio:.2f}×" + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "")


def _median(runs: Sequence[ArmRun], name: str) -> float:
    return statistics.median(getattr(run, name) for run in runs)


def _later(arm: Arm) -> Callable[[int], ArmRun]:
    return lambda number: arm.run(number + 1)


COLUMNS: Mapping[str, str] = {
    "seconds": "{:.2f} s",
    "cpu_s": "{:.2f} s",
    "mean_batch": "{:.1f}",
    "new_tokens": "{:,.0f}",
    "turns": "{:,.0f}",
    "tokens_per_turn": "{:.1f}",
    "prompt_tokens": "{:,.0f}",
    "computed_prompt_tokens": "{:,.0f}",
    "hit_rate": "{:.0%}",
    "failures": "{:.0f}",
}


def _table(rounds: Sequence[Mapping[str, ArmRun]]) -> Table:
    """The medians of each arm."""
    table = Table(title="medians of a round", title_justify="left", show_edge=False)
    table.add_column("", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column.replace("_", " "), justify="right", no_wrap=True)
    for name in rounds[0]:
        runs = [row[name] for row in rounds]
        table.add_row(name, *(shape.format(_median(runs, column)) for column, shape in COLUMNS.items()))
    return table
