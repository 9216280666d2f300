"""The commands: each module's `run(config)` passes a configuration to the library, and prints."""
