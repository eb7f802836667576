"""vLLM alone on the workloads of `redline bench generate`, W4's long tail and W5's few rows: the same lengths and prompts.

    PYTHONPATH=src python benchmarks/peers/vllm_generate.py W4 W5-1 W5-4 W5-16 [--python .venv-vllm/bin/python] [--rounds 3]

For a machine whose memory or environment does not hold both; where it does, `redline bench generate workload=W4 peers=vllm
vllm_python=…` takes turns with ours. vLLM gets random weights of the same shape (`load_format=dummy`), the sizes that our
engine gets, `ignore_eos`, each request its own `max_tokens`, temperature 1, the logprob of the sampled token, and no seeds. It
runs in a process of its own (`lab/peers/vllm_process.py`); round 0 warms it up and does not count. One process serves all
workloads of one shape, with the sizes of the largest. The last thing printed is a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from redline.lab.bench.cases.generate import Workload
from redline.lab.bench.settings import GenerateSettings, fit_engine, make_settings
from redline.lab.material.networks import Network, shape_config
from redline.lab.material.workloads import RANDOM
from redline.lab.peers.vllm_side import VllmSide, vllm_arguments
from redline.models.files.hf import empty_decoder
from redline.telemetry import describe_environment, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--python", type=Path, help="of an environment that has vllm; this one unless given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    settings = {name: _settings(name, asked.device) for name in asked.workloads}
    assert len({each.model for each in settings.values()}) == 1, "workloads of one shape"
    some = next(iter(settings.values()))
    config = shape_config(some.model.removeprefix(RANDOM))
    network = Network(config, None, empty_decoder(config, "meta"))  # vLLM is told the shape alone, and draws its own weights
    workloads = {name: Workload(each, network) for name, each in settings.items()}
    sequences = max(each.prompts * each.n for each in settings.values())
    sizes = fit_engine(some.engine, sequences, max(workload.longest for workload in workloads.values()))
    found = {}
    with network.as_folder() as folder:
        arguments = vllm_arguments(folder, has_weights=False, dtype=some.dtype, engine=sizes, device=torch.device(asked.device))
        print(json.dumps(arguments), flush=True)
        started = time.perf_counter()
        side = VllmSide(arguments, asked.python)
        print(f"vLLM {side.version}, started in {time.perf_counter() - started:.0f} s", flush=True)
        for name, workload in workloads.items():
            runs = [side.run(workload.batch(number)) for number in range(1 + asked.rounds)][1:]
            found[name] = {"tokens": runs[0].num_tokens, "seconds": [run.seconds for run in runs]}
            print(name, found[name], flush=True)
        side.close()
    for name, each in found.items():
        seconds = statistics.median(each["seconds"])
        a_step = seconds / workloads[name].lengths_P.max()
        print(
            f"{name:6} {each['tokens'] / seconds:9,.0f} tok/s {seconds:8.2f} s {a_step * 1e3:7.2f} ms per step of the longest"
        )
    if asked.save:
        document = {"case": "vllm-generate", "identity": describe_environment(), "vllm": side.version, "arguments": arguments}
        write_json(asked.save, document | {"found": found})


def _settings(name: str, device: str) -> GenerateSettings:
    settings = make_settings("generate", [f"workload={name}", "peers=none", f"device={device}"])
    assert isinstance(settings, GenerateSettings)
    return settings


if __name__ == "__main__":
    main()
