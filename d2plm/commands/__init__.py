"""The commands: `run(config)` of each module calls the library and prints the result."""
