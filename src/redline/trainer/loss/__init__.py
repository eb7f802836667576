"""From logprobs and advantages to the loss."""
