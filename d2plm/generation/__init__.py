"""Generation: samplers, and the lengths of what they sample."""
