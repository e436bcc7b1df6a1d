"""Where the evaluations write: checked before any work is done, so that none is lost."""
from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ser import require

def check_out(path: Path, suffix: str, program: str, of: Any = None) -> None:
    """Raise UserError if `path` does not end in `suffix` or cannot be written, or if a .json there
    is not a result of `program`, or not one of the checkpoint, or checkpoints, with the digest
    `of`; None: the caller compares it."""
    require(path.suffix == suffix, f"--out {path} must end in {suffix}")
    require(os.access(path.resolve().parent, os.W_OK | os.X_OK),
            f"--out {path}: cannot write there")
    if suffix == ".json" and path.exists():
        found = None
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(path.read_text())
        require(isinstance(found, dict) and found.get("program") == program,
                f"--out {path} is there and is no result of {program}: choose another name")
        require(of is None or found.get("sha256") == of,
                f"--out {path} holds a result of another checkpoint: remove it or choose another "
                "--out")
