from __future__ import annotations

import json

from redline.lab.measure.clocks import gpu_row, read_clocks


def test_a_line_of_the_driver_becomes_numbers_and_leaves_out_what_it_does_not_tell() -> None:
    found = gpu_row("1980, 3201, 1980, 412.31, 700.00, [N/A], 5, 16")
    assert found == {
        "sm_mhz": 1980,
        "memory_mhz": 3201,
        "max_sm_mhz": 1980,
        "power_w": 412.31,
        "power_limit_w": 700,
        "pcie_generation": 5,
        "pcie_lanes": 16,
    }


def test_the_clocks_of_this_machine_fit_into_a_document() -> None:
    clocks = read_clocks()
    assert clocks.keys() == {"cpu", "gpus"}
    assert all(mhz > 0 for mhz in clocks["cpu"].get("mhz", []))
    assert json.dumps(clocks, allow_nan=False)
