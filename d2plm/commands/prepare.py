"""d2plm prepare: proteins → training and held-out stores without homologs between them."""

from d2plm.assembly.preparation import prepare_data as run

__all__ = ["run"]
