"""What differs between the machines of two saved results, by what their documents say of themselves.

Other hardware is no comparison: a difference says nothing about the code. Other software is one: a new torch may be
what is asked about, so that it is said beside the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Identity = Mapping[str, Any]
CPU_FACTS = {"model": "CPU", "usable_cores": "usable cores", "flags": "flags of the CPU"}
"""What decides how fast a CPU is, of all that `identity.cpu` has, in words."""
SOFTWARE = ("platform", "python")


def other_hardware(a: Identity, b: Identity) -> list[str]:
    """Return what differs in the device that was measured; empty where all that is known is the same."""
    devices = [_device(each) for each in (a, b)]
    if devices[0] != devices[1]:
        return [f"A was measured on {devices[0]}, B on {devices[1]}"]
    known = [_cpu(each) if devices[0] == "cpu" else _gpu(each) for each in (a, b)]
    names = _differing(*known)
    return [f"not the same {name}: A {_said(known[0].get(name))}, B {_said(known[1].get(name))}" for name in names]


def other_software(a: Identity, b: Identity) -> list[str]:
    """Return what differs around the code that was measured, in one sentence: versions, and the host of a GPU."""
    known = [_software(each) for each in (a, b)]
    if _device(a) == _device(b) != "cpu":
        known = [facts | _cpu(each) for facts, each in zip(known, (a, b), strict=True)]
    names = _differing(*known)
    found = [f"{name} {_said(known[0].get(name))} and {_said(known[1].get(name))}" for name in names]
    return [f"around them A and B had {', '.join(found)}"] if found else []


def _device(identity: Identity) -> str:
    return str(identity.get("device") or "cpu")


def _cpu(identity: Identity) -> dict[str, Any]:
    cpu = identity.get("cpu") or {}
    return {words: cpu.get(key) for key, words in CPU_FACTS.items()}


def _gpu(identity: Identity) -> dict[str, Any]:
    """The device's name is known to be the same; a machine may have other GPUs beside it."""
    own = [gpu for gpu in identity.get("gpus") or () if gpu.get("name") == _device(identity)]
    return {"driver": next((gpu.get("driver") for gpu in own), None)}


def _software(identity: Identity) -> dict[str, Any]:
    return {key: identity.get(key) for key in SOFTWARE} | dict(identity.get("packages") or {})


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]


def _said(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "unknown" if value is None else str(value)
