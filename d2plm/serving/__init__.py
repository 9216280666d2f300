"""The HTTP service of an exported model."""
