"""Files that are either complete or absent: checkpoints, output directories, shared storage."""
