"""The gradients of the authors' code, where SER_RELEASE names a clone of it."""
import os
from unittest.mock import MagicMock

import pytest
import torch

from paper.experiments import release
from test_ser import noise, same

CLONE = os.environ.get("SER_RELEASE")

def table(capsys):
    release.main(release.settings(["--release", CLONE]))
    _, *lines = capsys.readouterr().out.replace(",", "").splitlines()
    return {(name, part): words for name, part, *words in map(str.split, lines)}


def test_a_gradient_is_that_of_all_parameters():
    layer = torch.nn.Linear(1, 1)
    assert len(release.gradient(layer)) == 0
    layer.weight.grad = torch.full((1, 1), 3.0)
    assert release.gradient(layer).tolist() == [3]
    layer.bias.grad = torch.full((1,), -4.0)
    assert release.gradient(layer).tolist() == [3, -4]


def test_both_lambdas_see_the_same_images(monkeypatch):
    calls = []
    for name in ("theirs", "ours"):
        monkeypatch.setattr(release, name, lambda *given: calls.append(given) or dict.fromkeys(
            ("encoder", "projector"), torch.zeros(1)))
    monkeypatch.setattr(release, "dist", MagicMock())
    release.main(release.settings(["--release", "R"]))
    assert [weight for *_, weight in calls] == 2 * [0, 10_000]
    assert all(same(given[:2], calls[0][:2]) for given in calls)


def test_ours_are_the_gradients_of_lambda_on_views_of_two_motions(monkeypatch):
    build = MagicMock()
    monkeypatch.setattr(release.ser, "build", build)
    monkeypatch.setattr(release, "gradient", lambda module: module)
    found = release.ours(*noise(2, 4, 3, 224, 224), 10_000)
    model = build.return_value
    assert found == {"encoder": model.base.encoder, "projector": model.projectors}
    assert build.call_args.args[0].weight == 10_000
    first, second = model.call_args.args[0]
    assert not same(first.geometry, second.geometry)


@pytest.mark.skipif(not CLONE, reason="SER_RELEASE names no clone of the authors' code")
def test_a_gather_with_gradient_would_bring_it_back(capsys, monkeypatch):
    found = table(capsys)
    zero, large, *verdict = found["release", "encoder"]
    assert zero == large and verdict[0] == "equal"
    assert float(zero) == pytest.approx(33.517, rel=0.01)     # as README says
    assert found["release", "projector"][:2] == ["none", "none"]
    assert found["ours", "projector"][0] == "0"
    assert float(found["ours", "projector"][1]) > 1000

    from builder import moco
    monkeypatch.setattr(moco, "concat_all_gather_different_shape", lambda x, _: (x, [len(x)]))
    before, after, verdict = table(capsys)["release", "projector"]
    assert before == "0" and float(after) > 1000 and verdict == "different"
