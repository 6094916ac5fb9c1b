"""What a wrapper tells the person at the terminal, who may be gone."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Print `text` on standard error. If nobody can read it any more (a closed terminal), it goes nowhere, and so does
    everything after it."""
    if sys.stderr is None:  # closed from the beginning
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # Python would try to write what is left in the buffer at exit, and end with another exit code.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
