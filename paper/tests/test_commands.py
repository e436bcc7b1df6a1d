"""Every command line of the READMEs and of the scripts' headers is one that its script takes."""
import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

import eval_linear
import ser

ROOT = Path(ser.__file__).parent
READMES = ["README.md", "paper/README.md"]
SCRIPTS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("paper/[em]*/[a-z]*.py"))
           if path.name != "addon.py"]
COMMAND = r"\b(?:python|torchrun) [^\"]*?(ser\.py|eval_linear\.py|(?<=-m )\w+\.[\w.]+)( .*|$)"

def commands(name):
    """The script and the flags of each command line in a README or in the docstring of a script."""
    text = Path(ROOT, name).read_text()
    if name.endswith(".py"):
        text = ast.get_docstring(ast.parse(text))
    text = re.sub(r"\\\n\s*", "", text)
    fenced = re.findall(r"^```.*?^```", text, re.M | re.S)
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    lines = "\n".join(fenced if fenced else [text]).splitlines()
    for line in lines + [" ".join(code.split()) for code in inline]:
        # What explains a command stands after two spaces. `sbatch --wrap` quotes its command.
        for part in re.split(r"  +", line.strip())[0].split(" && "):
            if match := re.search(COMMAND, part.removesuffix('"') if "--wrap" in part else part):
                yield match[1], shlex.split(match[2], comments=True)

def parse(script, flags):
    """The settings of a command line, by the parser of its script."""
    if script == "eval_linear.py":
        return eval_linear.arguments().parse_args(flags)
    return (ser.parse if script == "ser.py" else importlib.import_module(script).settings)(flags)

@pytest.mark.parametrize("name", [*READMES, "ser.py", "eval_linear.py", *SCRIPTS])
def test_each_command_line_is_one_that_its_script_takes(name):
    """And each evaluation of --data names its --checkpoint."""
    assert list(commands(name))
    for script, flags in commands(name):
        args = parse(script, flags)
        if getattr(args, "data", "") and "checkpoint" in args:
            assert args.checkpoint, (script, flags)

def test_trainings_of_other_settings_have_other_folders_and_what_is_evaluated_was_trained():
    trained = {}
    evaluated = set()
    for script, flags in [line for name in READMES for line in commands(name)]:
        args = vars(parse(script, flags))
        if "base_lr" in args and "checkpoint" not in args:
            trained.setdefault(args["out"], []).append((script, args))
        evaluated |= {flag for flag in flags if re.fullmatch(r"runs/\S+/last.pt", flag)}
    for runs in trained.values():
        assert all(run == runs[0] for run in runs)
    assert len(trained) >= 20
    assert evaluated <= {f"{out}/last.pt" for out in (*trained, "runs/given")}
