"""Families of proteins: their alignment, column profile, pairs of columns, effects of mutations."""
