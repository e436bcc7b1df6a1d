import pytest
import torch

import eval_linear
import ser
from paper.evaluations import tsne
from paper.tests.toys import call, class_folders, parsed, saved_pictures, toy_checkpoint
from test_ser import parametrize, sentence

TSNE = pytest.importorskip("sklearn.manifold").TSNE


@parametrize("flags, transform", [
    ("--ready --label A B", tsne.v2.Resize((16, 16))), ("", eval_linear.eval_transform(16))])
def test_a_comparison_is_one_picture(flags, transform, tmp_path, monkeypatch):
    saved = saved_pictures(monkeypatch)
    drawn = []
    plot = tsne.plot
    monkeypatch.setattr(tsne, "plot", lambda _, x, *more: drawn.append(x) or plot(_, x, *more))
    val = class_folders(tmp_path / "val", per_class=12, size=24)
    one, two = [toy_checkpoint(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    call(tsne, f"--data {val} --checkpoint {one} {two} --out {val} --classes 4 --seed 2", flags)

    class_folders(tmp_path / "root/train")
    assert "class folders" in sentence(call, tsne, f"--data {tmp_path}/root --checkpoint {one}")
    data = eval_linear.ClassFolder(val, transform)
    sample = tsne.sample_classes(data, 4, 2)
    images, labels = zip(*sample)
    classes, colours = torch.tensor(labels).unique(return_inverse=True)
    assert (len(classes), len(sample)) == (4, 48)
    assert sample.indices != tsne.sample_classes(data, 4, 0).indices
    assert parsed(tsne, "--data D --checkpoint C").classes == 20     # as the paper
    assert "--classes 99" in sentence(tsne.sample_classes, data, 99, 0)
    data.classes.pop(min({*range(6)} - {*labels}))
    assert tsne.sample_classes(data, 4, 2).indices == sample.indices
    (figure, _, _), = [each for each in saved if str(each[1].parent) == val]     # of --out
    for name, run, panel, x in zip("AB", (one, two), figure.axes, drawn, strict=True):
        features = eval_linear.cls_features(ser.load_encoder(run), torch.stack(images))
        torch.testing.assert_close(x, features[:, -16:])
        places = TSNE(init="pca", metric="cosine", random_state=2).fit_transform(x)
        dots, = panel.collections
        assert dots.get_offsets().data == pytest.approx(places, rel=1e-3)
        assert (panel.get_title(), *dots.get_array()) == (name if flags else run, *colours.tolist())
