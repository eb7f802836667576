"""From a batch to the micro-batches that go through the network."""
