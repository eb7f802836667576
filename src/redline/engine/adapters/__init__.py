"""Engines that sample with the machinery of others, behind the same port."""
