"""Ray: nodes, places, locks, and who is alive."""
