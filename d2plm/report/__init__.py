"""The report: a run and its evaluation as one HTML page that needs no network."""
