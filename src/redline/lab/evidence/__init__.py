"""What noisy measurements can prove, and the document that records it."""
