"""Evaluation: the likelihood bound, the baselines beside it, and how both are reported."""
