"""A plan as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from redline.lab.bench.table import quantity
from redline.lab.plan.plan import Plan
from redline.telemetry.console.tables import Fitted

SMALL = 0.005
"""Share of the worst phase below which a term has no row of its own."""
MOST_CUTS = 8


def render(plan: Plan) -> RenderableType:
    """Return the plan as tables and sentences: memory, settings, time, money, and what could be changed."""
    parts: list[RenderableType] = [_head(plan), _memory(plan), _host(plan), _choices(plan), _time(plan), _money(plan)]
    if plan.cuts:
        parts.append(_cuts(plan))
    return Group(*parts)


def _head(plan: Plan) -> Text:
    setup, work = plan.setup, plan.setup.work
    devices = f"{setup.gpus} x {setup.device.name}" if setup.gpus > 1 else setup.device.name
    trained = "" if setup.trained == setup.model.parameters else f", {setup.trained:,} trained"
    text = Text(f"{setup.model.path} ({setup.model.parameters:,} parameters{trained}) on {devices}\n", style="bold")
    text.append(
        f"a step: {work.groups} groups of {work.group_size}, prompts of {work.prompt_tokens} tokens, up to"
        f" {work.max_new_tokens} new ones, {work.mean_new_tokens:,.0f} on average\n",
        style="dim",
    )
    text.append(plan.verdict, style="bold green" if plan.fits else "bold red")
    for sentence in plan.left_out:
        text.append(f"\nnot in this plan: {sentence}", style="yellow")
    return text


def _memory(plan: Plan) -> Fitted:
    """A row for each term of memory, a column for each phase: phases are few, and a terminal is higher than wide."""
    table = Table(box=box.SIMPLE_HEAD, title="memory of one device at the peak of each phase, GB", title_justify="left")
    phases, names = plan.memory.phases, _terms(plan)
    table.add_column("", no_wrap=True)
    for phase in phases:
        style = "bold" if phase is plan.memory.worst else ""
        table.add_column(phase.name.replace("/", "/\n"), justify="right", style=style)
    for name in names:
        table.add_row(name, *(_gb(phase.terms.get(name, 0)) for phase in phases))
    others = [sum(size for name, size in phase.terms.items() if name not in names) for phase in phases]
    if any(others):
        table.add_row("other", *map(_gb, others))
    table.add_row("total", *(_gb(phase.total) for phase in phases), style="bold")
    free = [plan.setup.device.memory_bytes - phase.total for phase in phases]
    table.add_row("free", *(Text(_gb(size), style="red" if size < 0 else "") for size in free))
    return Fitted(table)


def _terms(plan: Plan) -> list[str]:
    """Return the terms of memory that are worth a row, in the order in which they come."""
    least = SMALL * plan.memory.worst.total
    found: dict[str, None] = {}
    for phase in plan.memory.phases:
        found |= {name: None for name, size in phase.terms.items() if size >= least}
    return list(found)


def _host(plan: Plan) -> Text:
    if not plan.setup.device.is_gpu:
        return Text("the device is the host: its memory is the above\n", style="dim")
    terms = ", ".join(f"{name} {quantity(size, 'bytes')}" for name, size in plan.memory.host.items())
    return Text(f"host memory of each process: {quantity(sum(plan.memory.host.values()), 'bytes')} ({terms})\n")


def _choices(plan: Plan) -> Fitted:
    table = Table(box=box.SIMPLE_HEAD, title="settings", title_justify="left")
    for title in ("key", "value", "why"):
        table.add_column(title, no_wrap=title != "why")
    for choice in plan.choices:
        table.add_row(choice.key, choice.value, choice.why)
    return Fitted(table)


def _time(plan: Plan) -> Fitted:
    table = Table(box=box.SIMPLE_HEAD, title="time of a step", title_justify="left")
    table.add_column("", no_wrap=True)
    for title in ("seconds", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("bound by")
    for phase in plan.time.phases:
        if phase.seconds:
            share = phase.seconds / plan.time.step_s
            table.add_row(phase.name, quantity(phase.seconds, "s"), f"{share:.0%}", phase.bound)
    table.add_row("step", quantity(plan.time.step_s, "s"), "", f"bottleneck: {plan.time.bottleneck.name}", style="bold")
    return Fitted(table)


def _money(plan: Plan) -> Text:
    setup = plan.setup
    text = Text(
        f"{plan.samples_per_hour:,.0f} samples/hour; ${plan.dollars_per_million:,.2f} per million samples,"
        f" ${plan.run_dollars:,.2f} for {setup.config.run.steps} steps, at ${setup.device.price * setup.gpus:g} an hour\n"
    )
    for line in _efficiency(plan):
        text.append(f"{line}\n", style="dim")
    return text


def _efficiency(plan: Plan) -> Iterator[str]:
    rates = plan.rates
    yield f"rates: {rates.flops / 1e12:,.3g} TFLOP/s, {rates.bandwidth / 1e9:,.4g} GB/s"
    for name, each in (("generation", rates.generation), ("training", rates.training), ("optimizer", rates.optimizer)):
        yield (
            f"{name}: products at {each.products:.0%} of them, memory at {each.memory:.0%}, {each.layer_s * 1e6:,.0f} µs more"
            f" per layer; {each.how}"
        )


def _cuts(plan: Plan) -> Fitted:
    title = "what else could be changed" if plan.fits else "what to cut"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("change", no_wrap=True)
    for name in ("saves", "step time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("costs")
    table.add_column("fits")
    enough = [cut for cut in plan.cuts if cut.fits]
    shown = [*plan.cuts[:MOST_CUTS], *(cut for cut in enough if cut not in plan.cuts[:MOST_CUTS])][: MOST_CUTS + 1]
    for cut in shown:
        saves = quantity(cut.saves, "bytes") if cut.saves > 0 else "nothing"
        table.add_row("\n".join(cut.settings), saves, f"x {cut.time_ratio:.2f}", cut.costs, "yes" if cut.fits else "no")
    return Fitted(table)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}" if abs(size) >= 5e7 else (f"{size / 1e9:.2f}" if size else "")
