"""Around the loop: rows of metrics, checkpoints, evaluations, interrupts."""
