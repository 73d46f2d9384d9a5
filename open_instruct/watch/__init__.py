"""Shows a run from its record: as views for programs, in the terminal, and as a page (`docs/reference/watch.md`). Writes nothing
into a run's directory."""
