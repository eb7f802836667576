"""Network definitions and checkpoint files shared by engine and trainer: one forward, two users."""
