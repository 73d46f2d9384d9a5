"""Programs of the user's that act through an endpoint of the engine, with exact token ids."""
