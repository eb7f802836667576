"""The parts of a decoder."""
