"""Calls of functions that the user wrote: in threads of their own, with a limit of time."""
