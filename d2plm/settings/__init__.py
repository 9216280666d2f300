"""The settings of everything, as dataclasses: each key is defined by one field."""
