import ast
import importlib
import re
import runpy
import shlex

from pytest import mark, raises
from torch.distributed.run import get_args_parser

from test_ser import HERE as ROOT

SCRIPTS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("paper/[em]*/[a-z]*.py"))]
ADDON = "paper/methods/addon.py"     # the parent of the four baselines
FENCED = r"(?ms)^```.*?^```"
COMMAND = r"\b(python|torchrun) ([^\"]*?)(ser\.py|eval_linear\.py|(?<=-m )\w+\.[\w.]+)( .*|$)"

def commands(name):
    """What runs each command line of a README or of a script's docstring, its script, its flags."""
    text = (ROOT / name).read_text()
    if name.endswith(".py"):
        text = ast.get_docstring(ast.parse(text))
    text = re.sub(r"\\\n\s*", "", text)
    lines = "\n".join(re.findall(FENCED, text) or [text]).splitlines()
    inline = re.findall(r"`([^`]+)`", re.sub(FENCED, "", text))
    for line in lines + [" ".join(code.split()) for code in inline]:
        # What explains a command stands after two spaces. `sbatch --wrap` quotes its command.
        for part in re.split(r"  +", line.strip())[0].split(" && "):
            if match := re.search(COMMAND, part.removesuffix('"') if "--wrap" in part else part):
                yield match[1], match[2].split(), match[3], shlex.split(match[4], comments=True)

def parse(script, flags):
    module = importlib.import_module(script.removesuffix(".py"))
    return (module.parse if script.endswith(".py") else module.settings)(flags)

@mark.parametrize("name", ["README.md", "paper/README.md", "ser.py", "eval_linear.py", *SCRIPTS])
def test_each_command_line_is_one_that_its_script_takes(name):
    assert list(commands(name)) or name == ADDON
    for runner, before, script, flags in commands(name):
        if runner == "torchrun":
            get_args_parser().parse_args([*before, script, *flags])
        parse(script, flags)

@mark.parametrize("name", sorted({"ser.py", "eval_linear.py", *SCRIPTS} - {ADDON}))
def test_each_script_reads_its_command_line(name, monkeypatch):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    raises(SystemExit, runpy.run_path, str(ROOT / name), run_name="__main__")

def test_trainings_of_other_settings_have_other_folders_and_what_is_evaluated_was_trained():
    trained, evaluated = {}, set()
    for *_, script, flags in [*commands("README.md"), *commands("paper/README.md")]:
        args = vars(parse(script, flags))
        if "base_lr" in args and "checkpoint" not in args:
            assert trained.setdefault(args["out"], (script, args)) == (script, args)
        evaluated |= {flag for flag in flags if re.fullmatch(r"runs/\S+/last.pt", flag)}
    assert evaluated <= {f"{out}/last.pt" for out in (*trained, "runs/given")}
