"""How much may be under way at once: groups, and workers that score."""
