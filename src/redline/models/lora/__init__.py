"""Low-rank adapters: in the engine, in the trainer, in files."""
