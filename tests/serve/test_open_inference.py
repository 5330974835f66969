"""The Open Inference Protocol, request by request. A real client of it is in tests_serve/."""

from __future__ import annotations

import base64
import gzip
import json
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving import Running, backbone, folder, picture, serving

from memoro.backbones import Backbone
from memoro.images import Decoder
from memoro.serve import bodies, open_inference
from memoro.serve.service import READERS

__all__ = ["backbone", "folder"]  # fixtures

IMAGES = [picture(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def server(backbone: Backbone, folder: Path) -> Iterator[Running]:
    with serving(backbone, folder, max_images=4, max_body=100_000, decoders=2 * READERS) as running:
        yield running


@pytest.fixture(scope="module")
def pixels(server: Running) -> torch.Tensor:
    (steps,) = server.store.current.model.passes(["pets"])
    found, _ = Decoder((steps,))([("", image) for image in IMAGES])
    return steps.normalise(found[0][0])


def tensor_input(pixels: torch.Tensor) -> dict[str, Any]:
    return {
        "name": "pixel_values", "datatype": "FP32", "shape": list(pixels.shape), "data": pixels.flatten().tolist(),
    }  # fmt: skip


def infer(server: Running, model: str, document: Any, **headers: str) -> Any:
    status, _, found = server.request("POST", f"/v2/models/{model}/infer", json.dumps(document).encode(), **headers)
    assert status == 200, found
    return {one["name"]: one for one in found["outputs"]}


def test_metadata(server: Running) -> None:
    assert server.request("GET", "/v2")[2]["name"] == "memoro"
    assert server.request("GET", "/v2/health/live")[0] == server.request("GET", "/v2/health/ready")[0] == 200
    _, _, found = server.request("GET", "/v2/models/tags")
    version = found["versions"][0]
    assert found["inputs"][0] == {"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, 20, 20]}
    assert [(one["name"], one["shape"]) for one in found["outputs"]] == [
        ("tags", [-1, 4]), ("tags.probabilities", [-1, 4]), ("tags.label", [-1]),
    ]  # fmt: skip
    assert server.request("GET", f"/v2/models/tags/versions/{version}")[2] == found
    for place in ("/ready", "/config", f"/versions/{version}/ready", f"/versions/{version}/config"):
        assert server.request("GET", f"/v2/models/tags{place}")[0] == 200
    assert server.request("GET", "/v2/models/tags/versions/7/ready")[0] == 404
    assert server.request("GET", "/v2/models/cars/ready")[0] == 404
    config = server.request("GET", "/v2/models/tags/config")[2]
    assert [one["data_type"] for one in config["output"]] == ["TYPE_FP32", "TYPE_FP32", "TYPE_STRING"]
    every = server.request("GET", "/v2/models/all")[2]
    assert every["inputs"][0]["shape"] == [-1, 3, -1, -1], "its tasks have two sizes"
    assert {"pets", "weight", "large.label"} <= {one["name"] for one in every["outputs"]}
    assert "weight.label" not in {one["name"] for one in every["outputs"]}
    index = server.request("POST", "/v2/repository/index")[2]
    assert [one["name"] for one in index] == ["all", *server.store.current.info]


def test_tensors_and_files_give_the_same_logits(server: Running, pixels: torch.Tensor) -> None:
    model = server.store.current.model
    with torch.no_grad():
        right = model(pixels, ["pets", "tags"])
    found = infer(server, "pets", {"id": "seven", "inputs": [tensor_input(pixels)]})
    assert list(found) == ["pets", "pets.probabilities", "pets.label"]
    assert found["pets"]["shape"] == [3, 2]
    # Rounding: another batch, within 1e-5 in float32 here.
    assert found["pets"]["data"] == pytest.approx(right["pets"].flatten().tolist(), abs=1e-5)
    assert found["pets.probabilities"]["data"] == pytest.approx(right["pets"].softmax(-1).flatten().tolist(), abs=1e-5)
    assert found["pets.label"]["data"] == [["cat", "dog"][i] for i in right["pets"].argmax(-1).tolist()]
    files = {
        "name": "image",
        "datatype": "BYTES",
        "shape": [3],
        "data": [base64.b64encode(one).decode() for one in IMAGES],
    }
    again = infer(server, "pets", {"inputs": [files]})
    assert again["pets"]["data"] == pytest.approx(found["pets"]["data"], abs=1e-5)
    outputs = [{"name": "tags.label"}, {"name": "base"}, {"name": "large", "parameters": {"classification": 2}}]
    some = infer(server, "all", {"inputs": [files], "outputs": outputs})
    assert list(some) == ["tags.label", "base", "large"]
    expected = [[one for one, value in zip("abcd", row, strict=True) if value >= 0] for row in right["tags"].tolist()]
    assert [sorted(json.loads(text)) for text in some["tags.label"]["data"]] == expected
    assert some["base"]["shape"] == [3, 7]
    assert some["large"]["shape"] == [3, 2]
    _, index, label = some["large"]["data"][0].split(":")
    assert label == "abc"[int(index)]
    assert label == model.predict(IMAGES[0], ["large"])[0]["large"]["label"]


def test_binary_and_compressed(server: Running, pixels: torch.Tensor) -> None:
    plain = infer(server, "pets", {"inputs": [tensor_input(pixels)]})
    raw = pixels.numpy().astype("<f4").tobytes()
    entry = {
        "name": "pixel_values",
        "datatype": "FP32",
        "shape": list(pixels.shape),
        "parameters": {"binary_data_size": len(raw)},
    }
    text = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    body = text + raw
    for encoding, pack in {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}.items():
        status, headers, data = server.request(
            "POST", "/v2/models/pets/infer", pack(body),
            content_encoding=encoding, accept_encoding=encoding, inference_header_content_length=str(len(text)),
        )  # fmt: skip
        assert status == 200, data
        assert headers.get("content-encoding") == (None if encoding == "identity" else encoding)
        data = zlib.decompress(data, 47) if encoding != "identity" else data
        length = int(headers["inference-header-content-length"])
        outputs = json.loads(data[:length])["outputs"]
        assert np.frombuffer(data[length:], "<f4", 6) == pytest.approx(plain["pets"]["data"], abs=1e-5)
        assert outputs[0]["parameters"]["binary_data_size"] == 24
        assert data.endswith(b"\3\0\0\0" + plain["pets.label"]["data"][-1].encode())


BAD: dict[str, tuple[Any, dict[str, str], int]] = {
    "no JSON": (b"{", {}, 400),
    "no object": (b"[]", {}, 400),
    "no inputs": (b"{}", {}, 400),
    "an unknown input": ({"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}, {}, 400),
    "another type": ({"name": "pixel_values", "datatype": "INT8", "shape": [1, 3, 2, 2], "data": [1]}, {}, 400),
    "another rank": ({"name": "pixel_values", "datatype": "FP32", "shape": [3, 20, 20], "data": [1]}, {}, 400),
    "too few numbers": ({"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 20, 20], "data": [1]}, {}, 400),
    "text": ({"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 1, 1], "data": ["a", "b", "c"]}, {}, 400),
    "ragged": ({"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 1, 1], "data": [[1], 2, 3]}, {}, 400),
    "huge numbers": ({"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 1, 1], "data": [1e30] * 3}, {}, 400),
    "NaN": (b'{"inputs":[{"name":"pixel_values","datatype":"FP32","shape":[1,3,1,1],"data":[NaN,1,1]}]}', {}, 400),
    "no patch": ({"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 1, 1], "data": [1] * 3}, {}, 422),
    "another size": ({"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [0] * 192}, {}, 422),
    "a vast size": ({"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 9**9, 9**9], "data": []}, {}, 400),
    "too many images": ({"name": "image", "datatype": "BYTES", "shape": [5], "data": ["AAAA"] * 5}, {}, 413),
    "no base64": ({"name": "image", "datatype": "BYTES", "shape": [1], "data": ["?"]}, {}, 422),
    "no images": ({"name": "image", "datatype": "BYTES", "shape": [1], "data": ["AAAA"]}, {}, 422),
    "numbers as images": ({"name": "image", "datatype": "BYTES", "shape": [1], "data": [1]}, {}, 400),
    "a negative shape": ({"name": "image", "datatype": "BYTES", "shape": [-1], "data": []}, {}, 400),
    "a wrong length": (b"{}", {"inference_header_content_length": "9"}, 400),
    "a strange length": (b"{}", {"inference_header_content_length": "-1"}, 400),
    "a length that Python cannot read": (b"{}", {"inference_header_content_length": "²"}, 400),
    "a length of many digits": (b"{}", {"inference_header_content_length": "0" * 11 + "1" * 5000}, 400),
    "many lists": (b"[" + b"[]," * 20_000 + b"0]", {}, 413),
    "no gzip": (b"{}", {"content_encoding": "gzip"}, 400),
    "an unknown encoding": (b"{}", {"content_encoding": "br"}, 415),
    "a gzip bomb": (gzip.compress(bytes(10_000_000)), {"content_encoding": "gzip"}, 413),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_requests(server: Running, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BRACKETS", 10_000)
    body, headers, right = BAD[what]
    data = body if isinstance(body, bytes) else json.dumps({"inputs": [body]}).encode()
    status, _, found = server.request("POST", "/v2/models/pets/infer", data, **headers)
    assert status == right, found
    assert len(found["error"]) < 300


def test_few_bodies_are_expanded_at_once(
    server: Running, pixels: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small body may be large after decompression, and larger once it is parsed: until only images are left of it,
    few others are."""
    began, own, waiting = list[int](), open_inference.read_request, threading.Event()

    def read(*given: Any) -> Any:
        began.append(1)
        assert waiting.wait(30)
        return own(*given)

    monkeypatch.setattr(open_inference, "read_request", read)
    body, found = gzip.compress(json.dumps({"inputs": [tensor_input(pixels)]}).encode()), list[int]()

    def ask(**headers: str) -> None:
        found.append(server.request("POST", "/v2/models/pets/infer", body, content_encoding="gzip", **headers)[0])

    threads = [threading.Thread(target=ask) for _ in range(2 * READERS)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        ask(x_request_timeout_ms="300")  # one that gives up makes no room for another
    assert len(began) == READERS
    waiting.set()
    for thread in threads:
        thread.join()
    assert sorted(found) == [200] * len(threads) + [504] * 2


@pytest.mark.parametrize(
    ("accepted", "right"),
    [("gzip;q=0", None), ("gzip; q=0.0, deflate", "deflate"), ("deflate;q=0.5, gzip;q=0.1", "gzip"), ("br", None)],
)
def test_accepted_encodings(server: Running, pixels: torch.Tensor, accepted: str, right: str | None) -> None:
    document = json.dumps({"inputs": [tensor_input(pixels)]}).encode()
    status, headers, _ = server.request("POST", "/v2/models/pets/infer", document, accept_encoding=accepted)
    assert (status, headers.get("content-encoding")) == (200, right)


def test_outputs_that_are_not_there(server: Running, pixels: torch.Tensor) -> None:
    wrong: list[Any] = [[{"name": "cars"}], [{}], "pets", [{"name": "pets", "parameters": {"classification": -1}}]]
    twice = [[{"name": name}, {"name": "pets.label"}, {"name": name}] for name in ("pets", "base")]
    for outputs in (*wrong, *twice):
        document = json.dumps({"inputs": [tensor_input(pixels)], "outputs": outputs}).encode()
        assert server.request("POST", "/v2/models/pets/infer", document)[0] == 400
    status, _, found = server.request(
        "POST", "/v2/models/all/infer", json.dumps({"inputs": [tensor_input(pixels)]}).encode()
    )
    assert (status, "was trained on images of 28x28" in found["error"]) == (422, True)
