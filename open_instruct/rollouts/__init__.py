"""The controller's side: which prompts are issued, and how results become the data of a training step."""
