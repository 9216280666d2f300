"""From a configuration to the library's objects: the only place that knows its keys."""
