"""When nothing moves: who waits for whom."""
