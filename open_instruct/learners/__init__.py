"""DeepSpeed learners: their models, their optimizer steps, and sending the weights to the engines."""
