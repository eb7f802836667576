"""What an attempt is made of: environments, each of which plays one attempt at a task with the policy."""
