"""The trajectories of a run: a small database of Arrow files and an index."""
