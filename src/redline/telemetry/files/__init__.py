"""The files of a run: its folder, and how they are written so that they survive a kill."""
