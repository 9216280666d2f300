"""From proteins to leak-free splits and packed batches; only loading needs torch."""
