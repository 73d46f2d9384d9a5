"""The owner's side of a program that ends with everything that it has started (`supervisor.py`)."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from open_instruct.system.cells.supervisor import supervise
from open_instruct.system.processes import words_of


class Supervised:
    """A program under a supervisor. `process` has its pipes and its exit code."""

    def __init__(self, process: asyncio.subprocess.Process, control: int) -> None:
        self.process = process
        self._control = control
        """File descriptor of our end of the supervisor's pipe; -1 once it is closed."""

    @classmethod
    async def start(
        cls, words: Sequence[str], *, variables: Mapping[str, str], directory: str = "", **pipes: Any
    ) -> "Supervised":
        """Start a program. `pipes` are those of `asyncio.create_subprocess_exec`.

        Raises:
            OSError: no process can be started, or the directory does not exist.
        """
        theirs, ours = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *[*words_of(supervise), str(theirs), *words],
                env=dict(variables),
                cwd=directory or None,
                pass_fds=[theirs],
                start_new_session=True,  # Ctrl-C reaches the whole group; the owner decides when programs end
                **pipes,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return cls(process, ours)

    def kill(self) -> None:
        """Have the supervisor kill the program and all that it has started. May be called twice, and from any thread."""
        control, self._control = self._control, -1
        if control >= 0:
            os.close(control)
