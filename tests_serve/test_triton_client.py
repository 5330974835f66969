"""NVIDIA's client for the Open Inference Protocol, against a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with triton.InferenceServerClient(url.removeprefix("http://")) as found:
        yield found


@pytest.fixture
def image(folder: Path) -> bytes:
    return (folder / "image.png").read_bytes()


def answers(url: str, image: bytes) -> Any:
    """What memoro's own API says of the image."""
    with urlopen(Request(f"{url}/v1/predict?top_k=9", image)) as response:
        return json.load(response)["images"][0]["answers"]


def test_server_and_models(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata()["name"] == "memoro"
    assert client.is_model_ready("pets")
    assert not client.is_model_ready("cars")
    metadata = client.get_model_metadata("pets")
    version = metadata["versions"][0]
    assert client.is_model_ready("pets", version)
    assert not client.is_model_ready("pets", "1")
    assert client.get_model_metadata("pets", version) == metadata
    assert [one["name"] for one in metadata["outputs"]] == ["pets", "pets.probabilities", "pets.label"]
    assert client.get_model_config("all")["max_batch_size"] > 1
    names = {one["name"] for one in client.get_model_repository_index()}
    assert names == {"all", "pets", "tags", "weight", "my fruits"}


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_encoded_images(client: Any, url: str, image: bytes, binary: bool, compression: str | None) -> None:
    given = triton.InferInput("image", [2], "BYTES")
    given.set_data_from_numpy(np.array([image, image], dtype=object), binary_data=True)
    outputs = [
        triton.InferRequestedOutput(name, binary_data=binary)
        for name in ("pets", "pets.probabilities", "pets.label", "weight", "tags.label")
    ]
    found = client.infer(
        "all", [given], outputs=outputs, request_id="7",
        request_compression_algorithm=compression, response_compression_algorithm=compression,
    )  # fmt: skip
    right = answers(url, image)
    assert found.get_response()["id"] == "7"
    assert found.as_numpy("pets").shape == (2, 3)
    # Rounding: another batch size, within 1e-4 in float32.
    assert found.as_numpy("pets.probabilities").max(-1) == pytest.approx(right["pets"]["probability"], abs=1e-4)
    label = found.as_numpy("pets.label")[1]
    assert (label.decode() if isinstance(label, bytes) else label) == right["pets"]["label"]
    assert found.as_numpy("weight")[0, 0] == pytest.approx(right["weight"]["values"]["cat"], rel=1e-4)
    assert json.loads(found.as_numpy("tags.label")[0]) == right["tags"]["labels"]


def test_pixels_names_with_spaces_and_classes(client: Any) -> None:
    shape = client.get_model_metadata("my fruits")["inputs"][0]["shape"]
    pixels = np.random.default_rng(0).standard_normal((3, *shape[1:]), dtype=np.float32)
    results = []
    for binary in (True, False):
        given = triton.InferInput("pixel_values", list(pixels.shape), "FP32")
        given.set_data_from_numpy(pixels, binary_data=binary)
        results.append(client.infer("my fruits", [given]).as_numpy("my fruits"))
    assert results[0] == pytest.approx(results[1], abs=1e-4)
    assert not np.allclose(results[0][0], results[0][1])
    output = triton.InferRequestedOutput("my fruits", class_count=2)
    classes = client.infer("my fruits", [given], outputs=[output]).as_numpy("my fruits")
    assert classes.shape == (3, 2)
    assert int(classes[0, 0].decode().split(":")[1]) == results[0][0].argmax()


def test_errors_are_the_client_s_own(client: Any, image: bytes) -> None:
    given = triton.InferInput("image", [1], "BYTES")
    given.set_data_from_numpy(np.array([b"no image"], dtype=object), binary_data=True)
    with pytest.raises(InferenceServerException, match="not a readable image"):
        client.infer("pets", [given])
    with pytest.raises(InferenceServerException, match="no model 'cars'"):
        client.infer("cars", [given])
