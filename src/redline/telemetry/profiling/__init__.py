"""Profilers on demand: one folder for each profiled step, of a run that was told beforehand or is asked while it goes on.

profiles/step-000003/
  summary.json     the largest operators, by stage      request.json    what was asked for
  timeline.json    spans of every lane and process, with torch's operators and kernels on one clock, for ui.perfetto.dev
  torch.json       torch's own trace                    flame.svg       where Python was, by py-spy
  memory.pickle    the GPU allocator's history, for pytorch.org/memory_viz

Profiling costs time, so a profiled step says nothing about speed. Loads no torch until a step is profiled.
"""
