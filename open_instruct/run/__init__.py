"""A whole run: creates its parts, runs the step loop, watches and saves the run, and ends it."""
