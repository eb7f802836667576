"""What an answer is worth, and who computes it."""
