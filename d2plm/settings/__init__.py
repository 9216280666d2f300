"""The settings of everything, as dataclasses: one field states all there is to say about a key."""
