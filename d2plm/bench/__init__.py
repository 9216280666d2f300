"""Benchmarks that anybody can run on their own machine; imports nothing heavy."""
