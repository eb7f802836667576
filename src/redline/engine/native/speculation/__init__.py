"""Tokens that are guessed from what is known and verified several at a time: the same samples in fewer steps."""
