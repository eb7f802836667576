"""Traces of systems that are not ours: from a PyTorch profile or an nsys export to the CPU work that left devices idle.

    json_stream ─► kineto ─┐                 ┌─► clocks, engines   who belongs together, by collectives
                           ├─► Timeline ─────┼─► stalls            when an engine did nothing useful, and who was late
    sqlite3 ─────► nsys ───┘   (columns)     └─► blame ─► causes   what the late process did meanwhile, also across messages

`diagnosis.diagnose(paths)` runs all of it; what a capture lacks is collected on the way and said, never guessed.
"""
