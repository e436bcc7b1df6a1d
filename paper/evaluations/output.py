"""Where the evaluations write: checked before any work is done, so that none is lost."""
from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ser import require

# Settings in which a result and one that replaces it may differ. A checkpoint has its digest.
FREE = ("checkpoint", "label", "batch_size", "workers", "out")

def check_out(path: Path, suffix: str, program: str, digest: Any = None,
              settings: dict[str, Any] | None = None) -> None:
    """Raise UserError if `path` does not end in `suffix` or cannot be written, or if a .json there
    is not a result of `program`, of the checkpoint, or checkpoints, with this digest, and of these
    settings but for FREE; None: the caller compares them."""
    require(path.suffix == suffix, f"--out {path} must end in {suffix}")
    require(os.access(path.resolve().parent, os.W_OK | os.X_OK),
            f"--out {path}: cannot write there")
    if suffix == ".json" and path.exists():
        found = None
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(path.read_text())
        require(isinstance(found, dict) and found.get("program") == program,
                f"--out {path} is there and is no result of {program}: choose another name")
        way_out = "remove it or choose another --out"
        require(digest is None or found.get("sha256") == digest,
                f"--out {path} holds a result of another checkpoint: {way_out}")
        asked = json.loads(json.dumps(settings or {}))     # as JSON gives it back, tuples as lists
        for name, value in asked.items():
            there = found.get("settings", {}).get(name)
            require(name in FREE or there == value, f"--out {path} holds a result of another {name}"
                    f" ({there}, now {value}): {way_out}")
