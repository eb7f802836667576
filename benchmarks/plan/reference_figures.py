"""Write docs/reference-figures.md: the figures of the guides that redline was asked to answer, beside ours for the same case.

    python benchmarks/plan/reference_figures.py            writes the page
    python benchmarks/plan/reference_figures.py --check    fails if the page is not what would be written

The guides' figures are data below. Ours are read from benchmarks/results, or planned; none is typed here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from textbook import all_at_once, enough

from redline.config.load import validate
from redline.config.schema import Config
from redline.lab.plan.calibration import rates_of
from redline.lab.plan.devices import find_device
from redline.lab.plan.memory import estimate_memory
from redline.lab.plan.plan import Hardware, Plan, make_plan
from redline.lab.plan.setup import make_setup
from redline.lab.plan.sizes import choose_sizes, decoding_rows
from redline.lab.plan.timing import estimate_time, generation_cost

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference-figures.md"
RESULTS = ROOT / "benchmarks" / "results"
Mark = Literal["measured", "planned", "not comparable"]
PROMPT, NEW = 512, 512
"""Tokens of a prompt and of an answer where a guide names neither."""
GB = 1e9


@dataclass(slots=True, frozen=True)
class Figure:
    what: str
    theirs: str
    ours: str
    mark: Mark
    note: str = ""

    @property
    def row(self) -> str:
        return f"| {self.what} | {self.theirs} | {self.ours} | {self.mark} | {self.note} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    text = page()
    if not asked.check:
        PAGE.write_text(text)
        print(PAGE.relative_to(ROOT))
    elif PAGE.read_text() != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not what the results give; run {Path(__file__).relative_to(ROOT)}")


def page() -> str:
    return HEAD + "".join(_section(title, figures) for title, figures in sections())


def _section(title: str, figures: list[Figure]) -> str:
    preface = f"{PREFACES[title]}\n\n" if title in PREFACES else ""
    return f"\n## {title}\n\n{preface}{TABLE}" + "".join(f"{figure.row}\n" for figure in figures)


HEAD = f"""# Reference figures

redline began with five documents about making reinforcement learning of language models fast. Every figure of their tables is
here, beside what we measured or planned for the same case.

- **measured**: from a file in [`benchmarks/results`](../benchmarks/results), named in the note.
- **planned**: by `redline plan` ([planning.md](planning.md)); where a guide names no lengths, for prompts of {PROMPT} tokens
  and answers of {NEW}, 64 groups of 8.
- **not comparable**: the same words, but not the same thing; the note says why.

This page is written by `benchmarks/plan/reference_figures.py`; our figures come from the results and from the planner.
"""
_UNKNOWN_WORK = """The guide says neither how long its samples are nor how many turns they take. What is planned here is one
turn of the lengths above: the two columns are of different work, and their ratio is no speedup."""
PREFACES = {
    "Samples per hour on 8 H100": _UNKNOWN_WORK,
    "Scaling of 7B": f"{_UNKNOWN_WORK} The share of ideal scaling can be compared.",
    "Cost of a million samples on H100": _UNKNOWN_WORK,
}
TABLE = "| case | guide | ours | | note |\n| --- | --- | --- | --- | --- |\n"


def sections() -> Iterator[tuple[str, list[Figure]]]:
    yield "Generation", list(generation())
    yield "n samples of one prompt", list(n_sampling())
    yield "Weight sync", list(weight_sync())
    yield "Memory of 7B on 80 GB", list(memory_example())
    yield "What saves memory", list(memory_savings())
    yield "What makes it faster", list(speedups())
    yield "Samples per hour on 8 H100", list(samples_per_hour())
    yield "Scaling of 7B", list(scaling())
    yield "Cost of a million samples on H100", list(cost())
    yield "Targets", list(targets())
    yield "Where the time of a step goes", list(breakdown())
    yield "A game with long rollouts", list(game())
    yield "Data protocol and coordination", list(protocol())
    yield "Tuning advice with numbers", list(advice())


# ── ours ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def saved(path: str) -> dict[str, Any] | None:
    file = RESULTS / path
    return json.loads(file.read_text()) if file.is_file() else None


def result(path: str, name: str) -> dict[str, Any] | None:
    document = saved(path)
    return next((r for r in document["results"] if r["name"] == name), None) if document else None


def recipe(shape: str, groups: int = 64, group: int = 8, new: int = NEW, rows: int = 512, **sections: dict[str, Any]) -> Config:
    task = {"kind": "import", "path": "no:tasks"}
    extra = {"advantages": "batch"} if group == 1 else {}
    return validate(
        {
            "model": {"path": f"random:{shape}"},
            "rollouts": {"task": task, "groups_per_step": groups, "group_size": group, "max_new_tokens": new, **extra}
            | sections.pop("rollouts", {}),
            "engine": {"max_num_seqs": max(rows, group)} | sections.pop("engine", {}),
            **sections,
        },
        "reference figures",
    )


@cache
def planned(model: str, gpu: str, gpus: int = 1, key: str = "") -> Plan:
    """`key` is a JSON object of sections."""
    sections = json.loads(key) if key else {}
    return make_plan(recipe(model, **sections), Hardware(gpu, gpus), prompt_tokens=PROMPT)


def with_sections(**sections: Any) -> str:
    return json.dumps(sections, sort_keys=True)


def tokens_per_s(model: str, gpu: str, rows: int, tensor_parallel: int = 1) -> str:
    """Of one engine that decodes so many sequences."""

    setup = make_setup(recipe(model, groups=rows, group=1, rows=rows), find_device(gpu), prompt_tokens=PROMPT)
    setup = replace(setup, gpus=tensor_parallel, tensor_parallel_size=tensor_parallel)
    rates = rates_of(setup.device)
    return f"{setup.work.new_tokens / generation_cost(setup, rows, rates).seconds(rates.generation):,.0f} tok/s"


def measured_or(figure: dict[str, Any] | None, text: str, source: str, what: str, theirs: str) -> Figure:
    if figure is None:
        return Figure(what, theirs, "", "not comparable", "not measured yet")
    return Figure(what, theirs, text, "measured", source)


# ── the guides' figures ────────────────────────────────────────────────────────────────────────────────────────────────


def generation() -> Iterator[Figure]:
    cases = [
        ("Qwen2.5-0.5B, H100, `max_num_seqs=512`", "~15,000 tok/s", "qwen2.5-0.5b", "h100", 512, 1),
        ("Qwen2.5-7B, H100, `max_num_seqs=256`", "~4,000 tok/s", "qwen2.5-7b", "h100", 256, 1),
        ("Qwen2.5-32B, 4 H100, TP 4, `max_num_seqs=128`", "~2,000 tok/s", "qwen2.5-32b", "h100", 128, 4),
        ("Llama-3-8B, A100, `max_num_seqs=256`", "~3,500 tok/s", "llama-3-8b", "a100", 256, 1),
    ]
    for what, theirs, model, gpu, rows, tp in cases:
        yield Figure(what, theirs, tokens_per_s(model, gpu, rows, tp), "planned", f"{PROMPT} → {NEW} tokens")
    for name, file, work in (
        ("Qwen2.5-0.5B's shape, H200, 512 sequences", "h200/generate-w1.json", "128 → 512 tokens, with logprobs"),
        ("Qwen2.5-7B's shape, H200, 512 sequences", "h200/generate-w3.json", "128 → 256 tokens, with logprobs"),
    ):
        if figure := result(file, "throughput"):
            yield Figure(name, "", f"{figure['value']:,.0f} tok/s", "measured", f"{work}; {file}")
    yield Figure(
        "attention backend chosen for the GPU", "10-30% throughput", "", "not comparable", "one backend, our own kernels"
    )


def n_sampling() -> Iterator[Figure]:
    times = {
        2: ("100 ms", "180 ms", 1.8),
        4: ("150 ms", "350 ms", 2.3),
        8: ("250 ms", "700 ms", 2.8),
        16: ("400 ms", "1400 ms", 3.5),
    }
    file = "h200/n-sampling-n1.json"
    for n, (one, separate, ratio) in times.items():
        figure = result(file, f"n = {n}: one request against {n} requests, one after the other")
        ours = f"{figure['value']:.2f}x" if figure else ""
        yield measured_or(
            figure,
            ours,
            f"0.5B's shape, 2,048-token prompts, H200; {file}",
            f"n = {n}",
            f"~{one} against ~{separate}: {ratio}x",
        )


def weight_sync() -> Iterator[Figure]:
    shared = "engine and trainer read one storage: nothing is sent"
    file = "h200/weight-sync.json"
    figure = result(file, "shared storage")
    ours = f"{1e3 * figure['value']:.2f} ms" if figure else ""
    yield measured_or(figure, ours, f"{shared}; H200; {file}", "0.5B, CUDA IPC, colocated", "~100 ms")
    yield Figure("7B, CUDA IPC, colocated", "~500 ms", "0", "planned", shared)
    for what, theirs, model, tp in (
        ("7B, NCCL broadcast", "~2 s", "qwen2.5-7b", 1),
        ("32B, CUDA IPC, TP 4", "~2 s", "qwen2.5-32b", 4),
        ("70B, NCCL broadcast, TP 8", "~10 s", "llama-3-70b", 8),
    ):
        plan = make_plan(recipe(model), Hardware("h100", 8, sharding="full", tensor_parallel_size=tp), prompt_tokens=PROMPT)
        yield Figure(
            what,
            theirs,
            f"{1e3 * plan.time.seconds_of('weight sync'):,.0f} ms",
            "planned",
            "8 H100 in one machine, over NVLink",
        )
    yield Figure("CUDA IPC against a network", "10-100x", "", "not comparable", "one machine; no network in between")
    yield Figure("LoRA alone is sent", "faster", "0", "planned", shared)


def memory_example() -> Iterator[Figure]:
    phase = all_at_once(7e9, 20 * GB, 10 * GB, 5 * GB)
    ours = planned("qwen2.5-7b", "h100")
    worst = ours.memory.worst
    names = {
        "weights": ("weights",),
        "KV cache": ("KV cache",),
        "gradients": ("gradients",),
        "optimizer states": ("masters", "moments"),
        "activations": ("activations", "logits", "layer at work"),
        "gaps": ("CUDA context", "gaps"),
    }
    notes = {
        "gradients": "summed in float32",
        "optimizer states": "float32 masters and two float32 means, 12 bytes instead of 4",
        "activations": "of one sequence: there is no room for more",
        "KV cache": "what 512 attempts need",
    }
    for name, size in phase.terms.items():
        mine = sum(worst.terms.get(term, 0) for term in names[name])
        yield Figure(name, f"{size / GB:.0f} GB", f"{mine / GB:.1f} GB", "planned", notes.get(name, ""))
    yield Figure(
        "total",
        f"{phase.total / GB:.0f} GB, does not fit",
        f"{worst.total / GB:.0f} GB, {'fits' if ours.fits else 'does not fit'}",
        "planned",
    )
    cuts = [" ".join(cut.settings) for cut in ours.cuts if cut.fits]
    yield Figure(
        "what makes it fit",
        "; ".join(enough(phase, 80 * 10**9)),
        "; ".join(f"`{cut}`" for cut in cuts),
        "planned",
        "each alone",
    )


def _change(label: str, theirs: str, before: dict[str, Any], after: dict[str, Any], note: str = "") -> Figure:
    """Memory and time of a step on an H200, 7B, 8,192 tokens at once, before and after a change."""

    device = find_device("h200")
    rates = rates_of(device)
    fixed = {"max_tokens_per_micro_batch": 8192}
    worst, seconds = [], []
    for sections in (before, after):
        merged = {**sections, "trainer": {**fixed, **sections.get("trainer", {})}}
        merged.setdefault("engine", {})
        merged["engine"] = {"kv_cache_memory_bytes": 10 * 10**9, **merged["engine"]}
        setup = make_setup(recipe("qwen2.5-7b", **merged), device, prompt_tokens=PROMPT)
        memory = estimate_memory(setup)
        worst.append(memory.worst.total)
        seconds.append(estimate_time(setup, memory, rates).step_s)
    saves, slower = 1 - worst[1] / worst[0], seconds[1] / seconds[0]
    ours = f"{saves:.0%} less memory, step time x {slower:.2f}"
    return Figure(label, theirs, ours, "planned", note or "7B on an H200, of all that is in memory")


def memory_savings() -> Iterator[Figure]:
    yield _change("gradient checkpointing", "30-50%, 10-20% slower", {}, {"trainer": {"gradient_checkpointing": "full"}})
    yield _change("CPU offload", "20-30%, 30-50% slower", {}, {"trainer": {"offload_optimizer": True}}, "the optimizer's state")
    yield _change(
        "lower precision",
        "50%, minimal impact",
        {"model": {"path": "random:qwen2.5-7b", "dtype": "float32"}},
        {},
        "masters and means stay float32",
    )
    yield _change(
        "LoRA instead of all weights",
        "90%+, similar quality",
        {},
        {"trainer": {"lora": {"rank": 32}}},
        "rank 32; the weights themselves stay",
    )
    yield _change(
        "smaller batch",
        "linear, lower throughput",
        {},
        {"trainer": {"max_tokens_per_micro_batch": 4096}},
        "half the tokens at once",
    )
    yield _change(
        "smaller KV cache",
        "variable, fewer sequences at once",
        {},
        {"engine": {"kv_cache_memory_bytes": 5 * 10**9}},
        "10 GB to 5 GB",
    )
    yield _change("8-bit optimizer states", "", {}, {"trainer": {"optimizer_states": "int8"}}, "not in the guides")


def speedups() -> Iterator[Figure]:
    file = "h200/n-sampling-n1.json"
    on, off = (result(file, f"n = 8: one request against 8 requests, at once, prefix caching {word}") for word in ("on", "off"))
    if on and off:
        ratio = off["value"] / on["value"]
        yield Figure(
            "prefix caching",
            "1.2-1.5x",
            f"{ratio:.2f}x",
            "measured",
            f"8 requests of one 2,048-token prompt at once, with against without; {file}",
        )
    one, four = (planned("qwen2.5-7b", "h100", gpus, with_sections(trainer={"lora": {"rank": 16}})) for gpus in (1, 4))
    ratio = one.time.seconds_of("generation") / four.time.seconds_of("generation")
    yield Figure(
        "engines 1 → 4", "2-3x, 4x the memory", f"{ratio:.1f}x", "planned", "generation of 7B's attempts on 1 and 4 H100"
    )
    yield Figure("CUDA IPC against broadcast", "10-100x sync", "", "not comparable", "weights are shared, nothing is sent")
    yield _change(
        "bf16 against fp32",
        "1.5-2x, 50% less memory",
        {"model": {"path": "random:qwen2.5-7b", "dtype": "float32"}},
        {},
        "memory alone: float32 products have another peak",
    )
    yield _change("gradient checkpointing", "0.8-0.9x, 30-50%", {}, {"trainer": {"gradient_checkpointing": "full"}})
    yield _change("LoRA (rank 32)", "80-90% less memory", {}, {"trainer": {"lora": {"rank": 32}}})


SMALL_STATE = {"optimizer_states": "int8", "gradient_checkpointing": "full"}
"""Of models whose state is divided: what is divided stays on the devices."""
REFERENCE_RUNS = (
    ("Qwen2.5-0.5B, GRPO", "10,000", "qwen2.5-0.5b", {}),
    ("Qwen2.5-7B, GRPO", "1,500", "qwen2.5-7b", {}),
    ("Qwen2.5-32B, DAPO", "400", "qwen2.5-32b", {"trainer": SMALL_STATE}),
    (
        "Llama-3-8B, PPO",
        "1,200",
        "llama-3-8b",
        {"rollouts": {"advantages": "gae"}, "trainer": {"gradient_checkpointing": "full"}},
    ),
    ("Llama-3-70B, GRPO", "150", "llama-3-70b", {"trainer": SMALL_STATE}),
)


def samples_per_hour() -> Iterator[Figure]:
    for what, theirs, model, sections in REFERENCE_RUNS:
        plan = planned(model, "h100", 8, with_sections(**sections))
        yield Figure(what, theirs, f"{plan.samples_per_hour:,.0f}", "planned", _how(plan))


def _how(plan: Plan) -> str:
    chosen = {choice.key: choice.value for choice in plan.choices}
    states = "8-bit optimizer states, " if plan.setup.config.trainer.optimizer_states == "int8" else ""
    words = f"{states}sharding {chosen.get('sharding', 'none')}, TP {chosen.get('tensor parallel', 1)}"
    rows, wanted = decoding_rows(plan.setup, plan.memory.sizes), plan.setup.work.share(plan.setup.engines).sequences
    if rows < wanted:
        words += f", an engine's cache holds {rows} of its {wanted} attempts"
    return (
        words
        if plan.fits
        else f"{words}; does not fit as it is: {plan.memory.worst.total / GB:.0f} GB in {plan.memory.worst.name}"
    )


def scaling() -> Iterator[Figure]:
    theirs = {1: ("100", 1.0), 2: ("180", 0.9), 4: ("340", 0.85), 8: ("640", 0.8)}
    sections = with_sections(trainer={"offload_optimizer": True, "gradient_checkpointing": "light"})
    one = planned("qwen2.5-7b", "h100", 1, sections)
    for gpus, (rate, share) in theirs.items():
        plan = planned("qwen2.5-7b", "h100", gpus, sections)
        ratio = plan.samples_per_hour / one.samples_per_hour / gpus
        yield Figure(
            f"{gpus} GPU{'s' if gpus > 1 else ''}",
            f"{rate} samples/hour, {share:g}x",
            f"{plan.samples_per_hour:,.0f} samples/hour, {ratio:.2f}x",
            "planned",
            f"optimizer's state on the host, checkpointing light; {_how(plan)}",
        )
    seventy = planned("llama-3-70b", "h100", 8, with_sections(trainer=SMALL_STATE))
    yield Figure("8 GPUs, 70B", "50 samples/hour", f"{seventy.samples_per_hour:,.0f} samples/hour", "planned", _how(seventy))
    yield Figure(
        "N GPUs", "0.7-0.9 N", "as above", "planned", "one machine; half of the traffic hidden behind products is assumed"
    )


def cost() -> Iterator[Figure]:
    theirs = (
        ("0.5B", "qwen2.5-0.5b", 100, 200),
        ("7B", "qwen2.5-7b", 700, 1400),
        ("32B", "qwen2.5-32b", 2500, 5000),
        ("70B", "llama-3-70b", 7000, 14000),
    )
    runs = {model: sections for _, _, model, sections in REFERENCE_RUNS}
    for name, model, hours, dollars in theirs:
        plan = planned(model, "h100", 8, with_sections(**runs[model]))
        mine = 8e6 / plan.samples_per_hour
        yield Figure(
            name,
            f"{hours:,} GPU hours, ${dollars:,}",
            f"{mine:,.1f} GPU hours, ${plan.dollars_per_million:,.0f}",
            "planned",
            f"at $2 an hour; {_how(plan)}",
        )


def targets() -> Iterator[Figure]:
    yield Figure("weight sync, colocated", "< 2 s", "0", "planned", "shared storage")
    yield Figure("GPU utilization", "> 80%", "", "not comparable", "`redline train` reports it for a run")
    plan = planned("qwen2.5-0.5b", "h200")
    share = plan.memory.worst.total / plan.setup.device.memory_bytes
    yield Figure(
        "memory at the peak", "< 90%", f"{share:.0%}", "planned", "0.5B on an H200, at the budget that the trainer finds"
    )
    for name, file in (
        ("0.5B, 512 requests at once", "h200/generate-w1.json"),
        ("7B, 512 requests at once", "h200/generate-w3.json"),
    ):
        if figure := result(file, "time to first token"):
            yield Figure(
                f"time to first token, {name}",
                "< 100 ms",
                f"{1e3 * figure['value']:,.0f} ms",
                "measured",
                f"median of a burst, H200; {file}",
            )


def breakdown() -> Iterator[Figure]:
    theirs = {"generation": "40-60%", "training": "20-30%", "weight sync": "5-15%", "data loading": "2-5%", "other": "5-10%"}
    plan = planned("qwen2.5-7b", "h100", 8)
    seconds = {phase.name: phase.seconds for phase in plan.time.phases}
    shares = {
        "generation": seconds["generation"],
        "training": sum(seconds.get(name, 0.0) for name in ("forward/backward", "optimizer step", "logprob passes")),
        "weight sync": seconds["weight sync"],
    }
    for name, share in theirs.items():
        if name in shares:
            yield Figure(name, share, f"{shares[name] / plan.time.step_s:.0%}", "planned", "7B on 8 H100")
        else:
            yield Figure(name, share, "", "not comparable", "the plan has no such phase; a run's ledger has")


def game() -> Iterator[Figure]:
    notes = (
        ("a step (32 groups of 2, horizon 4)", "~180 s, 20 steps/hour"),
        ("target", ">= 60 steps/hour"),
        ("rollouts of a step", "70-130 s"),
        ("trainer's GPU utilization", "40-50%"),
        ("one rollout", "~2 min"),
        ("volume reload and adapter discovery", "5-10 s per step"),
        ("warm start from stored states", "skips 30-60 s"),
        ("trimmed prompts", "30-40% fewer tokens"),
        ("reference logprobs from the rollouts", "half of the trainer's time"),
    )
    for what, theirs in notes:
        yield Figure(what, theirs, "", "not comparable", "a game, its engine and its cluster are needed")


def protocol() -> Iterator[Figure]:
    yield Figure(
        "`non_blocking=False` in transfers",
        "10-30% slower",
        "",
        "not comparable",
        "`redline bench transfer` measures it by size",
    )
    yield Figure(
        "`micro_batch_size_per_device_for_update` 4 → 1",
        "-75% batch efficiency",
        "",
        "not comparable",
        "tokens are packed; a micro-batch is a number of tokens",
    )
    yield Figure(
        "`micro_batch_size_per_device_for_experience` 16 → 2", "-87.5% batch efficiency", "", "not comparable", "the same"
    )
    yield Figure(
        "metadata sent to tensor-parallel ranks",
        "3 ms + 3 ms of every step",
        "",
        "not comparable",
        "every rank plans the step by itself; nothing is sent",
    )


def advice() -> Iterator[Figure]:
    yield Figure(
        "`gpu_memory_utilization`", "0.5-0.7", "0.5", "planned", "default; `redline plan` says what the attempts of a step need"
    )
    yield Figure("`max_num_batched_tokens`", "> 2048", "8192", "planned", "default")
    yield Figure(
        "micro-batch of passes without gradients",
        "2x",
        _forward_ratio(),
        "planned",
        "7B with offloaded state on an H200, tokens that fit",
    )


def _forward_ratio() -> str:

    sections = {"trainer": {"offload_optimizer": True, "kl_coef": 0.1, "reference_offload": True}}
    config = recipe("qwen2.5-7b", groups=4096, **sections)
    sizes = choose_sizes(make_setup(config, find_device("h200"), prompt_tokens=PROMPT))
    return f"{sizes.forward_tokens / sizes.training_tokens:.1f}x"


if __name__ == "__main__":
    main()
