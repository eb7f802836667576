"""The doctor of runs of other frameworks: as much as their logs support, with the settings of their own to change."""
