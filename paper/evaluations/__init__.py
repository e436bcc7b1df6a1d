"""What the evaluations share: flags, how they begin and end, checkpoints."""
import json
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Callable, Sequence

import eval_linear
import ser
from eval_linear import Checkpoint


# Label -> name of the file in paper/encoders.
ENCODERS = {"MoCo-v3": "MoCo-v3", "control": "control", "SER, λ = 0.1": "SER-0.1",
            "SER, λ = 0.5": "SER", "MoCo-v3 + rotation": "turned", "SER + rotation": "turned-SER"}


def arguments(data: str, several: bool = False, samples: bool = True) -> ArgumentParser:
    """The flags of the evaluations. data: the help of --data; several: whether it takes more than
    one checkpoint; samples: whether a seed changes something."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data", required=True, help=data)
    if several:
        add("--checkpoint", nargs="+", help="last.pt of one or more runs; none: paper/encoders")
        add("--label", nargs="+", help="their names; none: their paths, or those of ENCODERS")
    else:
        add("--checkpoint", required=True, help="last.pt of a run of any method")
    add("--out", default="", help="folder of the results; none: that of the first checkpoint")
    if samples:
        add("--seed", type=int, default=0, help="seed of all that is sampled")
    add("--workers", type=int, default=8, help="loader processes of a rank")
    return parser


def main(settings: Callable, evaluate: Callable, argv: Sequence[str] | None = None) -> None:
    """Run evaluate(args, device) with args = settings(argv), then end the group of processes."""
    args = settings(argv)
    evaluate(args, ser.setup())
    ser.leave_group()


def load_several(args: Namespace) -> list[Checkpoint]:
    """Checkpoints to compare, by default those of `ENCODERS`. Without --out, results go beside
    the first. Without --label, checkpoints that are given are labelled by their paths."""
    # With DATA/train/CLASS/, train and val would be taken for classes.
    if any(path.is_dir() for path in Path(args.data, "train").glob("*")):
        sys.exit(f"--data {args.data}: should be a folder of class folders, such as val in it")

    if not args.checkpoint:
        folder = Path(__file__).parents[1] / "encoders"
        args.checkpoint = [str(folder / f"{name}.pt") for name in ENCODERS.values()]
        args.label = args.label or list(ENCODERS)
    args.out = args.out or str(Path(args.checkpoint[0]).parent)
    args.label = args.label or args.checkpoint
    return [eval_linear.read_checkpoint(Namespace(checkpoint=path, data=args.data))
            for path in args.checkpoint]


def save_picture(figure: Any, name: str, args: Namespace, runs: Sequence[Checkpoint]) -> None:
    """Write a matplotlib figure beside the other results. Its metadata say what made it. Their
    checksum in the file name protects pictures of other settings or weights."""
    made_by = json.dumps(vars(args) | {"weights": [run.fingerprint for run in runs]})
    path = eval_linear.results_path(args, f"{name}-{ser.checksum([made_by])}.png")
    figure.savefig(path, metadata={"Description": made_by})
    print(f"the picture is {path}")


def training_settings(name: str, args: Namespace, checkpoint: Checkpoint,
                      images: Sequence[str]) -> dict:
    """What must be the same when a training goes on from a file, for ser.resume. These are the
    settings of the encoder's own training and, as NAME_..., the encoder, the settings of this
    training, and the names of its images below their folder. Folders may be renamed. Exits
    with one sentence if there is no whole batch, or the ranks cannot share it."""
    ranks, _ = ser.ranks_and_rank()
    if args.batch_size % ranks > 0 or args.batch_size > len(images):
        sys.exit(f"--batch-size {args.batch_size}: should be a multiple of the {ranks} ranks, and "
                 f"at most the {len(images)} images")

    own = vars(args) | {"checkpoint": checkpoint.fingerprint, "ranks": ranks, "images": len(images),
                        "checksum_of_names": ser.checksum(sorted(images)),
                        "bf16": eval_linear.has_bf16()}
    harmless = ("data", "out", "workers", "save_every")
    named = {f"{name}_{key}": value for key, value in own.items() if key not in harmless}
    return checkpoint.settings | named | {"data": args.data}
