"""A name for users: run files say `dataset_loader: open_instruct.rc_datasets.load_datasets`."""

from open_instruct.rc.datasets import load_datasets

__all__ = ["load_datasets"]
