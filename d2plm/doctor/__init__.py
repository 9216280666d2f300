"""Checks of this machine, its services and the cluster, each with advice on fixing problems.

Unlike the library, the checks name configuration keys: their advice is for the command line.
"""
