"""Imported last by the process that others are forked from, and by no other: what it has loaded stays, and their garbage
collectors need not look through it, each for itself."""

import gc
import os
from pathlib import Path

first, _, others = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
if first == str(Path(__file__).parents[1]):  # `start_the_origin` has put it before the others
    del os.environ["PYTHONPATH"]
    if others:
        os.environ["PYTHONPATH"] = others
gc.collect()
gc.freeze()
