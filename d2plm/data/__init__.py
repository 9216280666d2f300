"""From FASTA files to leakage-checked training and validation stores; imports no torch."""
