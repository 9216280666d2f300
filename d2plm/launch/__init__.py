"""Training as a job in a cluster, and torchrun's entry point."""
