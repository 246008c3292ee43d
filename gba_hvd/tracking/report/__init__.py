"""The report of a run: one HTML page, which `gba-hvd report` writes and each job's run in MLflow has."""
