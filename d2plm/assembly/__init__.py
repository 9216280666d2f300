"""Building the library's objects from a configuration: the only layer that knows its keys."""
