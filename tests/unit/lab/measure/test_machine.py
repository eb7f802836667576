from __future__ import annotations

import pytest
import torch

from redline.lab.measure import machine
from redline.lab.plan.calibration import _MEASURED_RATES


def test_rates_are_written_as_exactly_as_a_plan_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow core has 0.1049 TFLOP/s and 12.6 GB/s: 0.10 and 13 would move every share that is fitted to them by 3 to 5%."""
    monkeypatch.setattr(machine, "_product_seconds", lambda *_: 2 * 2048**3 / 0.1049e12)
    monkeypatch.setattr(machine, "_stream_seconds", lambda *_: (2**29 / 12.6e9, 1.0))
    found = machine.measure_machine(torch.device("cpu"), torch.float32)
    said = _MEASURED_RATES.search(found.how)
    assert said is not None
    bandwidth, flops = (float(text.replace(",", "")) for text in said.groups())
    assert bandwidth * 1e9 == pytest.approx(found.bandwidth, rel=1e-3)
    assert flops * 1e12 == pytest.approx(found.flops, rel=1e-3)
