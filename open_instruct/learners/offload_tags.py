"""Names of the parts of a learner's memory that are moved off its device, without torch: the driver names them too."""

WEIGHTS = "weights"
OPTIMIZER = "optimizer"
GRADIENTS = "gradients"
REFERENCE = "reference"
TAGS = (WEIGHTS, OPTIMIZER, GRADIENTS, REFERENCE)
"""A storage that two tags share moves with the earlier tag. Example: in fp32 training at stages 0 and 3 the master weights are
the weights themselves, so they move with `weights`."""
