"""What goes through a network in a step: policy, reference, critic."""
