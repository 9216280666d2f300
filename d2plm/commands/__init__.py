"""The commands: each module's `run(config)` wires a configuration to the library, and prints.

The pipeline's steps call the same functions, so a step on a cluster and a command on a laptop are
one piece of code.
"""
