"""`redline compare`: two sides, pairs of processes, a verdict."""
