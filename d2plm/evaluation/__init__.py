"""Evaluation: the likelihood bound, the baselines, and the report of both."""
