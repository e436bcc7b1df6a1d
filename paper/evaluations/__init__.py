"""What the evaluations share: files of results, names of pictures, a check for one process."""
import hashlib
import os
import sys
from argparse import Namespace
from pathlib import Path

import eval_linear

def write(path: Path, rows: list, args: Namespace, step: int, encoder: str = "trained") -> None:
    """Add rows of eval_linear.make_rows to a file. step: the training step of the checkpoint."""
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
