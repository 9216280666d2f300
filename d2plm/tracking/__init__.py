"""Tracking: MLflow runs, the model registry and the model that is served from it."""
