"""Checks of this machine, its services and the cluster, with advice for the command line."""
