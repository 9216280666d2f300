"""Experiment tracking, the MLflow model registry and model serving."""
