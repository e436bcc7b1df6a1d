"""What the evaluations share: they add results to a file, name pictures, and refuse ranks."""
import hashlib
import os
import sys
from argparse import Namespace
from pathlib import Path

import eval_linear

def write(path: Path, rows: list, args: Namespace, step: int, encoder: str = "trained") -> None:
    """Add eval_linear.make_rows of an encoder to a file. step: of the checkpoint evaluated."""
    step = step if encoder != "untrained" else 0
    common = {"encoder": encoder, "step": step, "settings": vars(args)}
    eval_linear.merge(path, [row | common for row in rows])

def picture(path: Path, args: Namespace) -> Path:
    """The path of a picture beside results, with a name that other settings do not have."""
    digest = hashlib.sha256(repr(vars(args)).encode()).hexdigest()
    return path.with_name(f"{path.stem}-{digest[:8]}.png")

def one_process() -> None:
    """Exit with one sentence under torchrun with several ranks."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.exit("this evaluation takes one process: start it with python, not with torchrun")
