"""The disk of the checkpoints fills up."""

from collections.abc import Sequence

from open_instruct.health.rule import PAGE, RULES, Row

CHECKPOINTS = 3
GIB = 2**30


@RULES.register(
    "disk_space",
    metrics=["storage/free_bytes", "storage/checkpoint_bytes"],
    fires_when=f"after a checkpoint the disk has room for fewer than {CHECKPOINTS} more",
    cure="Make room, give another --checkpoint_state_dir, or keep fewer: --keep_last_n_checkpoints.",
    link=f"{PAGE}#does-it-use-the-machine",
)
def disk_space(rows: Sequence[Row]) -> str | None:
    """After each checkpoint. The next is written before the oldest is removed."""
    free, size = rows[-1]["storage/free_bytes"], rows[-1]["storage/checkpoint_bytes"]
    if free >= CHECKPOINTS * size:
        return None
    return f"the disk has room for {free / size:.1f} more checkpoints of {size / GIB:.3g} GiB"
