"""Checks of this machine, its services and the cluster, each with a way to fix what is wrong.

Unlike the library, the checks name configuration keys: their advice is for the command line.
"""
