"""What the sides are given: prompts, tasks, batches, networks."""
