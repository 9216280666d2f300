"""From any collection of proteins to packed batches that do not leak; only loading needs torch."""
