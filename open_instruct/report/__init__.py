"""What a run tells: log, metrics, tables and pictures."""
