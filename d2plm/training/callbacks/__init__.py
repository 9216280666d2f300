"""Optional parts of training, one callback per file."""
