"""Tokens to text, and the strings that end it."""
