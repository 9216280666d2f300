"""Optional parts of a training, one callback a file."""
