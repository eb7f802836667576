"""One file per way to bring weights to an engine, each with one `Transport`. `launch/engine_side.py` chooses."""
