"""The settings of everything, as dataclasses: one field says a key's name, type, range and meaning."""
