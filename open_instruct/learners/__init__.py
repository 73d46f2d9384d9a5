"""DeepSpeed learners: models, optimizer steps, and the weights on their way to the engines."""
