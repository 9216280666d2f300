"""Checks of this machine, its services and the cluster, each with what mends it."""
