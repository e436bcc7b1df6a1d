"""Encoders go to timm and come from it with equal features; what cannot is refused.

    python -m pytest -q paper/tests/test_convert.py
"""
import re

import pytest
import torch

import eval_linear
import ser
from paper.experiments import convert
from test_ser import close, shake

SHAPE = dict(image_size=32, patch_size=8, dim=16, depth=2, heads=2)

def timms_vit(**more):
    """timm's ViT of SHAPE with random weights everywhere, in eval mode."""
    timm = pytest.importorskip("timm")
    vit = timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=16, depth=2,
                                        num_heads=2, num_classes=0, **more)
    return shake(vit).eval()

def run_of(tmp_path, cls_layer):
    """A checkpoint of a small run, and its encoder."""
    cfg = ser.Config(**SHAPE, cls_layer=cls_layer, ratio=0.25, equiv_layers=(1,), moco_hidden=16,
                     batch_size=8, seed=5)
    model = shake(ser.build(cfg))
    path = tmp_path / "run" / "last.pt"
    path.parent.mkdir()
    ser.save_whole(path, dict(step=7, program="ser.py", shape=model.base.encoder.shape,
                              config=vars(cfg), images="4, ab", model=model.state_dict(),
                              optimizer=cfg.optimizer(model).state_dict()))
    return path, model.base.encoder.eval()

def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))

@pytest.mark.parametrize("more", [{}, {"no_embed_class": True}, {"num_classes": 5}])
def test_timms_weights_give_timms_features_here(more, tmp_path, capsys):
    vit = timms_vit(**{name: value for name, value in more.items() if name != "num_classes"})
    weights = vit.state_dict()
    if "num_classes" in more:     # a classifier's head is left out
        weights |= {"head.weight": torch.zeros(5, 16), "head.bias": torch.zeros(5)}
    torch.save(weights, tmp_path / "timm.pth")
    out = tmp_path / "new" / "last.pt"
    argv = ["--from-timm", str(tmp_path / "timm.pth"), "--out", str(out), "--heads", "2"]
    assert convert.main(argv) == 0 and str(out) in capsys.readouterr().out
    x = images()
    with torch.no_grad():
        close(ser.load_encoder(out)([x])[0].cls, vit(x))
    cfg = ser.Config(**SHAPE, cls_layer=0, ratio=0.0, moco_hidden=16, batch_size=8, init=str(out))
    close(ser.build(cfg).base.encoder.state_dict(), ser.load_encoder(out).state_dict())
    assert eval_linear.frozen_encoder(eval_linear.Settings(checkpoint=str(out)))[1] == 0

def test_an_encoder_with_cls_at_the_input_gives_timm_equal_features(tmp_path, capsys):
    path, encoder = run_of(tmp_path, 0)
    assert convert.main(["--to-timm", str(path), str(tmp_path / "timm.pth")]) == 0
    timm = pytest.importorskip("timm")
    vit = eval(capsys.readouterr().out.partition("MB: ")[2], {"timm": timm}).eval()     # as printed
    vit.load_state_dict(torch.load(tmp_path / "timm.pth", weights_only=True))
    x = images()
    with torch.no_grad():
        close(vit(x), encoder([x])[0].cls)
    # There and back again.
    back = convert.from_timm(torch.load(tmp_path / "timm.pth", weights_only=True), heads=2)
    close(back.state_dict(), encoder.state_dict())
    assert back.shape == encoder.shape

def test_a_late_cls_is_refused_with_four_lines_that_are_right(tmp_path, capsys):
    path, encoder = run_of(tmp_path, 1)
    assert convert.main(["--to-timm", str(path), str(tmp_path / "timm.pth")]) == 2
    lines, said = capsys.readouterr()
    assert "enters after block 1" in said and said.count("\n") == 1
    assert lines.count("\n") == 4 and not (tmp_path / "timm.pth").exists()
    x = images()
    found = {"ser": ser, "x": x}
    with torch.no_grad():
        exec(lines, found)
        expected = encoder([ser.normalise(x)], [1])[0]
    close(found["features"], expected.cls)
    close(found["tokens"], expected.maps[1])

def test_timm_would_be_silently_wrong_with_a_late_cls(tmp_path):
    vit = timms_vit()
    encoder = convert.from_timm(vit.state_dict(), heads=2, cls_layer=1).eval()
    x = images()
    with torch.no_grad():
        assert (encoder([x])[0].cls - vit(x)).abs().max() > 0.05

def test_moco_v3s_checkpoint_gives_either_encoder_and_its_fixed_codes(tmp_path, capsys):
    encoders = {}
    state = {}
    for name in ("base", "momentum"):
        encoder = ser.ViT(32, 8, 24, 2, 12, 0, "sincos")
        torch.nn.init.normal_(encoder.cls_token, std=1 if name == "base" else 2)
        encoders[name] = encoder
        for key, w in convert.to_timm(encoder).items():
            state[f"module.{name}_encoder.{key}"] = w
        state[f"module.{name}_encoder.head.0.weight"] = torch.zeros(4, 24)
    state["module.predictor.0.weight"] = torch.zeros(4, 4)
    torch.save({"epoch": 300, "arch": "vit_small", "state_dict": state, "optimizer": {}},
               tmp_path / "moco.pth.tar")
    for name, flag in (("base", []), ("momentum", ["--momentum"])):
        out = tmp_path / f"{name}.pt"
        argv = ["--from-timm", str(tmp_path / "moco.pth.tar"), "--out", str(out), *flag]
        assert convert.main(argv) == 0
        given = ser.load_encoder(out)
        close(given.state_dict(), encoders[name].state_dict())
        assert given.shape == encoders[name].shape     # 12 heads, sincos

def test_encoder_only_keeps_the_encoder_and_little_else(tmp_path):
    path, encoder = run_of(tmp_path, 1)
    small = tmp_path / "small.pt"
    assert convert.main(["--encoder-only", str(path), str(small)]) == 0
    close(ser.load_encoder(small).state_dict(), encoder.state_dict())
    assert all(name.startswith("base.encoder.") for name in ser.load_checkpoint(small)["model"])
    weights = sum(w.numel() for w in encoder.state_dict().values())
    assert small.stat().st_size < 4 * weights + 25_000 < path.stat().st_size
    # What --random-init and --equivariance need of a checkpoint is kept.
    assert ser.load_checkpoint(small)["config"]["seed"] == 5
    settings = eval_linear.Settings(checkpoint=str(small))
    assert eval_linear.frozen_encoder(settings)[1] == 7

@pytest.mark.parametrize("argv, words", [
    ([], "required"), (["--from-timm", "{there}"], "needs --out"),
    (["--from-timm", "/no/such", "--out", "{new}"], "/no/such"),
    (["--from-timm", "{text}", "--out", "{new}"], "cannot be read"),
    (["--from-timm", "{list}", "--out", "{new}"], "no state dict"),
    (["--from-timm", "{there}", "--out", "{new}"], "without cls_token"),
    (["--from-timm", "{there}", "--out", "{new}", "--momentum"], "module.momentum_encoder"),
    (["--from-timm", "{scaled}", "--out", "{new}", "--heads", "2"], "blocks.0.ls1.gamma"),
    (["--from-timm", "{plain}", "--out", "{new}", "--heads", "3"], "heads 3"),
    (["--from-timm", "{plain}", "--out", "{text}", "--heads", "2"], "is there already"),
    (["--to-timm", "{text}", "{new}"], "damaged"), (["--encoder-only", "{there}"], "2 arguments")])
def test_a_mistake_is_one_line_and_exit_code_2(argv, words, tmp_path, capsys):
    plain = convert.to_timm(ser.ViT(**SHAPE, cls_layer=0))
    (tmp_path / "text").write_text("no checkpoint")
    torch.save({"a": torch.zeros(1)}, tmp_path / "there")
    torch.save([1], tmp_path / "list")
    torch.save(plain, tmp_path / "plain")
    torch.save(plain | {"blocks.0.ls1.gamma": torch.ones(16)}, tmp_path / "scaled")
    names = {name: tmp_path / name for name in ("text", "there", "list", "plain", "scaled", "new")}
    assert convert.main([word.format(**names) for word in argv]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not (tmp_path / "new").exists()

def test_the_modules_commands_are_those_that_it_takes():
    command = r"^    python -m paper\.experiments\.convert (.*)$"
    commands = re.findall(command, convert.__doc__, re.M)
    assert len(commands) == 3
    for command in commands:
        convert.parse(command.split())
