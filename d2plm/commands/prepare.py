"""d2plm prepare: split sequences into training and held-out stores without shared homologs."""

from d2plm.assembly.preparation import prepare_data as run

__all__ = ["run"]
