"""The DiT backbone: configuration, layers, the packed attention operator and its FLOP count."""
