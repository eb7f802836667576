"""The sides of a comparison: ours and those of others."""
