"""Foundations of the library, independent of models, data and runs."""
