"""From a recorded run to a ranked list of causes, each with its evidence, its remedy and what that would gain."""
