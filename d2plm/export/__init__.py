"""The exported model folder, its card, and the page that shows a run."""
