"""Ray: nodes, places, locks, and checks that nodes and processes are alive."""
