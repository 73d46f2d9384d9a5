"""The record of a run: what was sampled, scored and trained on, once, on disk (`docs/reference/record.md`)."""
