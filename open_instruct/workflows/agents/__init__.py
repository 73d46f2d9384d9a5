"""User programs that talk to the model through an HTTP endpoint of the engine, with exact token ids."""
