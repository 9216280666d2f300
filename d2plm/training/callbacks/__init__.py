"""What training may do besides training: one callback a file."""
