"""Tensors of the Open Inference Protocol, as JSON and as bytes behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memoro.errors import ServeError
from memoro.images.preprocessing import MAX_PIXEL
from memoro.serve.bodies import decode_base64, parse_json


@dataclass(frozen=True)
class InferInput:
    """One input: its description, and its bytes if they follow the JSON."""

    name: str
    shape: list[int]
    datatype: str
    data: Any
    binary: bytes | None


@dataclass(frozen=True)
class InferRequest:
    """What a client sent."""

    id: str | None
    inputs: list[InferInput]
    outputs: list[dict[str, Any]]
    binary: bool
    """Whether outputs that do not say otherwise are sent as bytes."""


def read_request(body: bytes, header_length: str | None) -> InferRequest:
    """The request of a body: JSON, then the bytes of binary inputs one after the other."""
    length = len(body)
    if header_length is not None:
        if not header_length.isdecimal() or len(header_length) > 12 or not 0 < int(header_length) <= len(body):
            raise ServeError("Inference-Header-Content-Length is not the length of the JSON.", 400)
        length = int(header_length)
    document, at = parse_json(body[:length]), length
    inputs = []
    for item in _objects(document, "inputs"):
        size = _parameters(item).get("binary_data_size")
        binary = None
        if size is not None:
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(body) - at:
                raise ServeError("binary_data_size does not fit the body.", 400)
            binary, at = body[at : at + size], at + size
        shape = item.get("shape")
        if not isinstance(shape, list) or not all(type(n) is int and 0 < n < 1 << 31 for n in shape):
            raise ServeError("the shape of an input must be a list of positive whole numbers.", 400)
        inputs.append(InferInput(str(item.get("name")), shape, str(item.get("datatype")), item.get("data"), binary))
    if at != len(body):
        raise ServeError("there are bytes after the last input.", 400)
    outputs = _objects(document, "outputs") if "outputs" in document else []
    given = document.get("id")
    if given is not None and not isinstance(given, str):
        raise ServeError("id must be a string.", 400)
    return InferRequest(given, inputs, outputs, _parameters(document).get("binary_data_output") is True)


def read_pixels(given: InferInput, channels: int, most: int, side: int) -> Tensor:
    """(n, channels, height, width) float32, if the shape is allowed and all values can be pixels."""
    shape = given.shape
    if given.datatype != "FP32" or len(shape) != 4 or shape[1] != channels or max(shape[2:]) > side:
        raise ServeError(
            f"pixel_values must be FP32 of shape [images, {channels}, height, width], at most {side} a side.", 400
        )
    if shape[0] > most:
        raise ServeError(f"{shape[0]} images in one request; at most {most} are allowed.", 413)
    count = math.prod(shape)
    try:
        if given.binary is not None:
            values = np.frombuffer(given.binary, dtype="<f4")
        else:
            values = np.asarray(given.data, dtype=np.float32).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        raise ServeError("the data of pixel_values must be numbers.", 400) from None
    if values.size != count:
        raise ServeError(f"pixel_values has {values.size} numbers; its shape needs {count}.", 400)
    if not (np.abs(values) <= MAX_PIXEL).all():  # NaN fails too
        raise ServeError(f"pixel_values must be finite numbers of at most {MAX_PIXEL:,.0f} in absolute value.", 400)
    return torch.from_numpy(values.reshape(shape).copy())


def read_files(given: InferInput, most: int) -> list[bytes]:
    """The encoded images of a BYTES input: length-prefixed in binary, base64 in JSON."""
    if given.datatype != "BYTES" or len(given.shape) not in {1, 2} or math.prod(given.shape) != given.shape[0]:
        raise ServeError("image must be BYTES of shape [images] or [images, 1].", 400)
    if given.shape[0] > most:
        raise ServeError(f"{given.shape[0]} images in one request; at most {most} are allowed.", 413)
    if given.binary is not None:
        found, at = [], 0
        while at + 4 <= len(given.binary):
            end = at + 4 + int.from_bytes(given.binary[at : at + 4], "little")
            found.append(given.binary[at + 4 : end])
            at = end
        if at != len(given.binary):
            raise ServeError("the bytes of image are not length-prefixed files.", 400)
    else:
        rows = given.data if isinstance(given.data, list) else [None]
        flat: list[Any] = [one for row in rows for one in (row if isinstance(row, list) else [row])]
        if not all(isinstance(one, str) for one in flat):
            raise ServeError("the data of image must be base64 strings.", 400)
        found = [decode_base64(one, f"image {number}") for number, one in enumerate(flat, start=1)]
    if len(found) != given.shape[0]:
        raise ServeError(f"image has {len(found)} files; its shape says {given.shape[0]}.", 400)
    return found


Output = Tensor | Sequence[Sequence[str]] | Sequence[str]


def write_outputs(
    head: Mapping[str, Any], outputs: Sequence[tuple[str, Output, bool]]
) -> tuple[dict[str, Any], list[bytes]]:
    """The JSON of a response, and the bytes of those outputs that are to be binary."""
    entries: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for name, value, binary in outputs:
        entry: dict[str, Any] = {"name": name}
        if isinstance(value, Tensor):
            entry |= {"datatype": "FP32", "shape": list(value.shape)}
            if binary:
                numbers: npt.NDArray[np.float32] = value.numpy().astype("<f4")
                tail.append(numbers.tobytes())
            else:
                entry["data"] = value.flatten().tolist()
        else:
            texts = [one for row in value for one in ([row] if isinstance(row, str) else row)]
            columns = [] if not value or isinstance(value[0], str) else [len(value[0])]
            entry |= {"datatype": "BYTES", "shape": [len(value), *columns]}
            if binary:
                encoded = [text.encode(errors="backslashreplace") for text in texts]
                tail.append(b"".join(len(one).to_bytes(4, "little") + one for one in encoded))
            else:
                entry["data"] = texts
        if binary:
            entry["parameters"] = {"binary_data_size": len(tail[-1])}
        entries.append(entry)
    return {**head, "outputs": entries}, tail


def _objects(document: Any, name: str) -> list[dict[str, Any]]:
    found = document.get(name) if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ServeError(f"{name} must be a list of JSON objects.", 400)
    return found


def _parameters(item: Mapping[str, Any]) -> Mapping[str, Any]:
    found = item.get("parameters", {})
    return found if isinstance(found, dict) else {}


def output_options(item: Mapping[str, Any], default: bool) -> tuple[bool, int]:
    """Whether an output is to be binary, and how many classes of it are asked for (0: the tensor itself)."""
    parameters = _parameters(item)
    classes = parameters.get("classification", 0)
    if isinstance(classes, bool) or not isinstance(classes, int) or not 0 <= classes <= 100_000:
        raise ServeError("classification must be a number of classes.", 400)
    return parameters.get("binary_data", default) is True, classes
