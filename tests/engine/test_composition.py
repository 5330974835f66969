"""Compositions: what they refuse, and what a user does with them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_task
from families import CASES
from PIL import Image
from trust import add_readout

import memoro
from memoro.backbones import Backbone
from memoro.errors import BackboneError, CompositionError, TaskError
from memoro.tasks.mask import trace_lineage


def picture(seed: int, size: tuple[int, int] = (33, 25)) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values)


def test_an_empty_composition_is_the_backbone(backbone: Backbone, pixels: torch.Tensor) -> None:
    model = memoro.compose(backbone)
    assert torch.equal(model(pixels)["base"], backbone.original(pixels))
    assert model.names == []
    assert model.predict([picture(0)]) == [{}]
    assert model.verify(pixels).base_equal


def test_attach_and_detach_give_new_compositions(backbone: Backbone, pixels: torch.Tensor) -> None:
    empty = memoro.compose(backbone)
    pets = random_task(backbone, "pets")
    one = empty.attach(pets)
    two = one.attach(random_task(backbone, "breeds", seed=1, extends=[pets]))
    assert (empty.names, one.names, two.names) == ([], ["pets"], ["pets", "breeds"])
    with pytest.raises(CompositionError, match="cannot detach 'pets', because 'breeds' extends it: detach that first"):
        two.detach("pets")
    assert two.detach("breeds").detach("pets").names == []
    assert torch.allclose(two.detach("breeds")(pixels)["pets"], two(pixels)["pets"], atol=1e-5)


@pytest.mark.parametrize(
    ("names", "parents", "message"),
    [
        (["a", "a"], [[], []], "two tasks are named 'a'"),
        (["a"], [["b"]], "attach 'b' too"),
        (["a", "b"], [["b"], ["a"]], "cycle: 'a' -> 'b' -> 'a'"),
        (["a"], [["a"]], "cycle"),
        (["a", "b", "c", "d"], [[], ["d"], ["b"], ["c"]], "cycle"),
    ],
)
def test_impossible_lineages(names: list[str], parents: list[list[str]], message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        trace_lineage(names, parents, [0] * len(names))


def test_ancestors_are_all_generations() -> None:
    lineage = trace_lineage("abcde", [[], ["a"], ["b"], [], ["c", "d"]], [0, 3, 1, 0, 2])
    assert lineage.ancestors == ((), (0,), (1, 0), (), (2, 3, 1, 0))
    assert lineage.visible(4, 2) == (4, 2, 3, 0)
    assert lineage.visible(4, 3) == (4, 2, 3, 1, 0)
    assert lineage.closure([2]) == (0, 1, 2)


def test_a_deep_chain_does_not_recurse() -> None:
    names = [str(i) for i in range(3000)]
    lineage = trace_lineage(names[::-1], [[str(i - 1)] if i else [] for i in range(3000)][::-1], [0] * 3000)
    assert len(lineage.ancestors[0]) == 2999


def test_a_missing_parent(backbone: Backbone) -> None:
    pets = random_task(backbone, "pets")
    with pytest.raises(CompositionError, match="attach 'pets' too"):
        memoro.compose(backbone, [random_task(backbone, "breeds", extends=[pets])])


def test_the_wrong_backbone() -> None:
    vit, dino, deeper = (next(c for c in CASES if c.name == name) for name in ("vit", "dinov2", "vit"))
    task = random_task(memoro.load_backbone(vit.model()), "pets")
    with pytest.raises(CompositionError, match=r"fingerprint .*train the task again"):
        memoro.compose(memoro.load_backbone(dino.model()), [task])
    with pytest.raises(CompositionError, match="other weights"):
        memoro.compose(memoro.load_backbone(deeper.model(seed=8)), [task])
    import transformers

    small = transformers.ViTModel(transformers.ViTConfig(hidden_size=36, num_attention_heads=3, num_hidden_layers=2))
    with pytest.raises(CompositionError, match="5 layers of 24; this one has 2 of 36"):
        memoro.compose(memoro.load_backbone(small), [task])


def test_another_dtype_of_the_same_backbone_fits(vit: Any, pixels: torch.Tensor) -> None:
    task = add_readout(memoro.load_backbone(vit), random_task(memoro.load_backbone(vit), "pets"))
    full = memoro.compose(memoro.load_backbone(vit), [task])(pixels)["pets"]
    for dtype, tolerance in (("bfloat16", 0.2), ("float64", 1e-4)):
        backbone = memoro.load_backbone(vit, dtype=dtype)
        other = memoro.compose(backbone, [task])(pixels)["pets"]
        assert (other.float() - full).norm() < tolerance * full.norm()


@pytest.mark.parametrize("live", [False, True])
def test_a_composition_is_pickled_and_copied(backbone: Backbone, pixels: torch.Tensor, live: bool) -> None:
    pets = add_readout(backbone, random_task(backbone, "pets", rank=2))
    model = memoro.compose(backbone, [pets, random_task(backbone, "breeds", seed=1, extends=[pets])], live=live)
    before = model(pixels)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert (other.names, other.live) == (model.names, live)
        answers = other(pixels)
        assert all(torch.equal(answers[name], before[name]) for name in ("base", "pets", "breeds"))
        assert other.tasks["pets"].head.weight.data_ptr() != model.tasks["pets"].head.weight.data_ptr()


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("tasks", [None, ["breeds", "rooms"], ["plain"]], ids=str)
def test_torch_compile_sees_one_graph(
    backbone: Backbone, pixels: torch.Tensor, tasks: list[str] | None, live: bool
) -> None:
    pets = add_readout(backbone, random_task(backbone, "pets", rank=2))
    others = [random_task(backbone, "breeds", seed=1, extends=[pets]), random_task(backbone, "rooms", seed=2)]
    others = [add_readout(backbone, task, from_layer=3) for task in others]
    model = memoro.compose(backbone, [pets, *others, random_task(backbone, "plain", seed=3)], live=live)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        wanted, found = model(pixels, tasks), compiled(pixels, tasks)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_model_that_was_compiled_predicts_by_what_was_compiled(backbone: Backbone, pixels: torch.Tensor) -> None:
    pets = add_readout(backbone, random_task(backbone, "pets", rank=2))
    model = memoro.compose(backbone, [pets, random_task(backbone, "breeds", seed=1, extends=[pets])])
    images = [np.full((20, 20, 3), level, dtype=np.uint8) for level in (10, 90, 180)]
    predicted, logits, tokens = model.predict(images), model(pixels), model.run(pixels).tokens
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model.compile(backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for use in (
            lambda: model.predict(images) == predicted,
            lambda: all(torch.equal(out, logits[name]) for name, out in model(pixels).items()),
            lambda: [row.to_json() for row in model.to(torch.float32).predict_stream(images)] == predicted,
            lambda: all(torch.equal(out, tokens[name]) for name, out in model.run(pixels).tokens.items()),
        ):
            known = len(graphs)
            torch.compiler.reset()
            assert use()
            assert len(graphs) == known + 1
    torch.compiler.reset()
    alone = memoro.compose(backbone, pets).predict(images)
    assert model.detach("breeds").predict(images) == alone != predicted
    assert len(graphs) == known + 1  # a new model is not compiled


def test_a_name_or_a_model_is_not_a_backbone(vit: Any) -> None:
    for given, what in (("memoro-tiny", "'memoro-tiny'"), (vit, type(vit).__name__)):
        for use in (
            lambda given=given: memoro.compose(given),
            lambda given=given: memoro.new_task(given, "pets", ["a", "b"]),
            lambda given=given: memoro.fit(given, random_task(memoro.load_backbone(vit), "pets"), "."),
        ):
            with pytest.raises(BackboneError, match=rf"{what} is not a backbone: pass load_backbone\({what}\)"):
                use()


def test_a_task_is_renamed(backbone: Backbone) -> None:
    one, other = random_task(backbone, "pets"), random_task(backbone, "pets", seed=1)
    with pytest.raises(CompositionError, match=r"two tasks are named 'pets'.*rename\(\)"):
        memoro.compose(backbone, [one, other])
    assert memoro.compose(backbone, [one, other.rename("animals")]).names == ["pets", "animals"]
    with pytest.raises(TaskError, match="reserved"):
        other.rename("base")


def test_one_task_may_stand_for_a_list_of_one(backbone: Backbone, tmp_path: Path) -> None:
    pets = random_task(backbone, "pets")
    assert memoro.compose(backbone, pets).names == ["pets"]
    assert memoro.new_task(backbone, "breeds", ["a", "b"], extends=pets).extends == (pets,)
    path = memoro.save_tasks(pets, tmp_path / "pets.safetensors")
    assert memoro.load_task(path).content_hash() == pets.content_hash()
    with pytest.raises(CompositionError, match=r"'pets.safetensors' is not a task; use load_task\(\)"):
        memoro.compose(backbone, "pets.safetensors")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=r"extends takes tasks \(load_task\(\) returns one\), not str"):
        memoro.new_task(backbone, "breeds", ["a", "b"], extends="pets.safetensors")  # type: ignore[arg-type]


def test_a_new_task_takes_numbers_and_labels_of_numpy(backbone: Backbone, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"cells": np.int64(2), "rank": np.int32(3), "from_layer": np.uint8(1), "seed": np.int64(4)}
    task = memoro.new_task(backbone, "pets", np.array(["cat", "dog"]), **sizes)  # type: ignore[arg-type]
    plain = memoro.new_task(backbone, "pets", ["cat", "dog"], cells=2, rank=3, from_layer=1, seed=4)
    assert task.content_hash() == plain.content_hash()
    assert [type(value) for value in (task.cells, task.rank, task.from_layer, task.labels[0])] == [int, int, int, str]
    assert memoro.load_task(memoro.save_task(task, tmp_path / "pets.safetensors")).spec == task.spec
    with pytest.raises(TaskError, match="labels must be non-empty strings, not 1"):
        memoro.new_task(backbone, "pets", np.array([1, 2]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "kind"), [("class", "softmax"), ("labels", "multilabel"), ("number", "regression"), ("softmax", "softmax")]
)
def test_a_head_is_named_as_in_training(backbone: Backbone, word: str, kind: str) -> None:
    assert memoro.new_task(backbone, "pets", ["a", "b"], head=word).kind == kind


@pytest.mark.parametrize("name", ["", " ", "base", "a/b", "a\\b", "..", ".hidden", "a\nb", "a\x00", "x" * 121, " a", 7])
def test_names_that_cannot_be(backbone: Backbone, name: Any) -> None:
    with pytest.raises(TaskError):
        memoro.new_task(backbone, name, ["a", "b"])


@pytest.mark.parametrize("name", ["pets", "Vögel 2", "犬", "a.b", "x-y_z"])
def test_names_that_can_be(backbone: Backbone, name: str) -> None:
    assert memoro.new_task(backbone, name, ["a", "b"]).name == name


@pytest.mark.parametrize(
    "options",
    [
        {"labels": []},
        {"labels": ["one"]},
        {"labels": ["a", "a"]},
        {"labels": "ab"},
        {"labels": ["a", 3]},
        {"cells": -1},
        {"cells": 2.5},
        {"from_layer": 6},
        {"from_layer": -1},
        {"head": "sigmoid"},
        {"memory_norm": "none"},
        {"init": "zeros"},
        {"extends": ["pets"]},
    ],
    ids=str,
)
def test_tasks_that_cannot_be(backbone: Backbone, options: dict[str, Any]) -> None:
    with pytest.raises(TaskError):
        memoro.new_task(backbone, "pets", **{"labels": ["a", "b"], **options})


def test_a_new_task_starts_as_a_copy_of_the_class_token(backbone: Backbone, vit: Any) -> None:
    pretrained = vit.vit.embeddings.cls_token.reshape(-1)
    assert torch.equal(memoro.new_task(backbone, "a", ["x", "y"]).class_token, pretrained)
    assert not torch.equal(memoro.new_task(backbone, "a", ["x", "y"], init="normal").class_token, pretrained)
    fork = memoro.new_task(backbone, "a", ["x", "y"], from_layer=2)
    assert torch.equal(fork.class_token, torch.zeros(24))
    assert fork.memory.shape == (3, 5, 24)
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn += [memoro.new_task(backbone, "a", ["x", "y"]).memory for _ in range(2)]
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    first, second = (memoro.new_task(backbone, "a", ["x", "y"], seed=seed) for seed in (1, 1))
    assert torch.equal(first.memory, second.memory)
    assert float(first.memory.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_a_neutral_task_without_cells_is_the_class_token(vit: Any, pixels: torch.Tensor) -> None:
    """Without memory and with the base's own token, a task's features are nearly the base's: it sees one key more."""
    backbone = memoro.load_backbone(vit.double())
    head = memoro.new_task(backbone, "head", ["x", "y"], cells=0, from_layer=5, seed=1)
    features = vit.vit(pixels.double()).last_hidden_state[:, 0]
    out = memoro.compose(backbone, [head])(pixels.double())["head"]
    assert (out - head.head(features)).abs().max() < 1e-12


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(3, 20, 20),
        torch.zeros(2, 1, 20, 20),
        torch.zeros(2, 4, 20, 20),
        torch.zeros(2, 3, 2, 2),
        torch.zeros(2, 3, 20, 20, dtype=torch.uint8),
        "picture.jpg",
    ],
    ids=lambda bad: str(getattr(bad, "shape", bad)),
)
def test_pixels_that_do_not_fit(backbone: Backbone, bad: Any) -> None:
    with pytest.raises(BackboneError):
        memoro.compose(backbone)(bad)


def test_tasks_of_another_input_size(backbone: Backbone, pixels: torch.Tensor) -> None:
    small, large = random_task(backbone, "small"), random_task(backbone, "large", seed=1)
    small.update_spec(preprocessing=backbone.preprocessing)
    large.update_spec(preprocessing=backbone.preprocessing.at(28))
    model = memoro.compose(backbone, [small, large])
    with pytest.raises(CompositionError, match=r"'large' was trained on images of 28x28.*any_size=True"):
        model(pixels)
    assert set(model(pixels, tasks=["small"])) == {"base", "small"}
    assert set(model(pixels, any_size=True)) == {"base", "small", "large"}
    assert list(model.passes().values()) == [["small"], ["large"]]
    answers = model.predict([picture(0), picture(1)])
    alone = memoro.compose(backbone, [large]).predict([picture(1)])
    assert list(answers[0]) == ["small", "large"]
    assert answers[1]["large"]["probability"] == pytest.approx(alone[0]["large"]["probability"], abs=1e-5)


def test_predict(backbone: Backbone, tmp_path: Path) -> None:
    one = random_task(backbone, "one", labels=["x", "y", "z"])
    many = random_task(backbone, "many", seed=1, labels=["p", "q"], head="multilabel")
    number = random_task(backbone, "number", seed=2, labels=["age"], head="regression")
    model = memoro.compose(backbone, [one, many, number])
    images = [picture(i) for i in range(5)]
    paths = [tmp_path / f"{i}.png" for i in range(5)]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    answers = model.predict(images, batch_size=2)
    assert len(answers) == 5
    assert sum(answers[0]["one"]["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert answers[0]["one"]["label"] == max(
        answers[0]["one"]["probabilities"], key=answers[0]["one"]["probabilities"].__getitem__
    )
    assert set(answers[0]["many"]["labels"]) == {k for k, p in answers[0]["many"]["probabilities"].items() if p >= 0.5}
    assert list(answers[0]["number"]["values"]) == ["age"]
    from_paths = model.predict(paths, tasks=["one"])
    assert [a["one"]["label"] for a in from_paths] == [a["one"]["label"] for a in answers]
    assert model.predict(str(paths[0]))[0]["one"]["label"] == answers[0]["one"]["label"]
    pixels = torch.stack([backbone.preprocessing.to_tensor(image) for image in images])
    logits = model(pixels)["one"]
    assert [a["one"]["label"] for a in answers] == ["xyz"[i] for i in logits.argmax(-1).tolist()]
    with pytest.raises(memoro.ImageError, match="no such file"):
        model.predict([tmp_path / "nothing.png"])
    with pytest.raises(CompositionError, match="the tasks are: one, many, number"):
        model.predict(images, tasks=["two"])


def test_explain_accounts_for_all_attention(backbone: Backbone, pixels: torch.Tensor) -> None:
    grand = random_task(backbone, "grand", cells=1)
    parent = random_task(backbone, "parent", seed=1, cells=2, from_layer=3, extends=[grand])
    child = random_task(backbone, "child", seed=2, cells=3, from_layer=1, extends=[parent])
    model = memoro.compose(backbone, [child, grand, parent])
    seen = model.explain(pixels, "child", normalised=True)
    assert seen.layers == (1, 2, 3, 4)
    assert seen.patches.shape == (4, 2, 3, 5, 5)
    assert seen.memory.shape == (4, 2, 3, 3)
    assert set(seen.parents) == {"grand", "parent"}
    total = seen.patches.sum((-1, -2)) + seen.prefix.sum(-1) + seen.itself + seen.memory.sum(-1)
    total = total + seen.parents["grand"] + seen.parents["parent"]
    assert torch.allclose(total, torch.ones_like(total), atol=1e-5)
    assert (seen.parents["parent"][:2] == 0).all()
    assert (seen.parents["parent"][2:] > 0).all()
    assert (seen.parents["grand"] > 0).all()
    assert seen.heatmap().shape == (2, 5, 5)


def test_verify_writes_a_receipt(backbone: Backbone, pixels: torch.Tensor) -> None:
    pets = random_task(backbone, "pets")
    breeds = add_readout(backbone, random_task(backbone, "breeds", seed=1, extends=[pets]))
    model = memoro.compose(backbone, [pets, breeds])
    receipt = model.verify(pixels)
    assert receipt.base_equal
    assert receipt.base_difference == 0
    assert set(receipt.tasks) == {"pets", "breeds"}
    assert max(receipt.tasks.values()) < 1e-4
    assert "bitwise equal" in str(receipt)


def test_verify_notices_a_changed_model(vit: Any, pixels: torch.Tensor) -> None:
    """The verification is about the model that the user holds: where they change it afterwards, it says so."""
    backbone = memoro.load_backbone(vit)
    vit.classifier = next(c for c in CASES if c.name == "vit").model(seed=9).classifier
    receipt = memoro.compose(backbone).verify(pixels)
    assert not receipt.base_equal
    assert receipt.base_difference > 1e-3
    assert "DIFFERENT" in str(receipt)
