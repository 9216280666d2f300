"""Launching: the pipeline's steps, and torchrun for the one that trains."""
