"""Files that are complete or do not exist: checkpoints, output directories, shared storage."""
