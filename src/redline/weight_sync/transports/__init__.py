"""One file per way to bring weights to an engine, each with one `Transport`. `launch/build.py` has the table of them."""
