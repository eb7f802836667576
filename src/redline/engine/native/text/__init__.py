"""The strings that end a completion."""
