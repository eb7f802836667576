"""A file per section of a recipe. A section has the name of its package, its metrics' prefix and its trace lane."""
