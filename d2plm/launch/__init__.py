"""Launching training processes: with torchrun on this machine, or as a job in a cluster."""
