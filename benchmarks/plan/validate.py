"""Hold plans against measurements: every point in a process of its own, a table on stderr, one JSON document saved.

python benchmarks/plan/validate.py --device cuda --save benchmarks/results/h200     under five minutes on an H200
python benchmarks/plan/validate.py --device cpu --save benchmarks/results/cpu       one thread, processor seconds
python benchmarks/plan/validate.py --again benchmarks/results/h200/plan.json        the same measurements, planned anew
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from redline.lab.plan.validate import again, load, render, save, validate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write DIR/plan.json")
    parser.add_argument("--again", type=Path, metavar="FILE", help="plan the points of a saved document anew, measure nothing")
    asked = parser.parse_args()
    console = Console(stderr=True, highlight=False, width=140)
    folder = asked.save or (asked.again.parent if asked.again else None)
    found = again(load(asked.again)) if asked.again else validate(asked.device, console, folder=folder)
    console.print(render(found))
    for phase, how in found["efficiency"].items():
        console.print(f"{phase}: {how}", style="dim", soft_wrap=True)
    if folder:
        print(save(found, folder))


if __name__ == "__main__":
    main()
