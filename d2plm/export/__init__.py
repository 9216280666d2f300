"""The exported model folder, its model card, and the report page of a run."""
