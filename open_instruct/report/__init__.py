"""Everything that a run reports: log, metrics, tables and plots."""
