"""Files that are whole or not there: checkpoints, output directories, shared storage."""
