"""From spans and rows to what people ask: phases, percentiles, targets, learning."""
