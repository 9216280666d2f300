"""Experiment tracking and the MLflow model registry."""
