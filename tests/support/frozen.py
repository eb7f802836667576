"""Imported last by the process that others are forked from, and by no other: what it has loaded stays, and their garbage
collectors need not look through it, each for itself."""

import gc
import os

_, _, others = os.environ.pop("PYTHONPATH").partition(os.pathsep)  # `start_the_origin` has put a folder before them
if others:
    os.environ["PYTHONPATH"] = others
gc.collect()
gc.freeze()
