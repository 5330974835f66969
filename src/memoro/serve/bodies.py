"""The bodies of requests and answers: images, JSON, and the tensors of the Open Inference Protocol."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from torch import Tensor

from memoro.errors import ServeError
from memoro.images.preprocessing import MAX_PIXEL
from memoro.serve.options import ServeOptions
from memoro.serve.service import Service, Upload

MAX_BRACKETS = 1 << 18
"""As many as 64 images of 1024 rows in three channels need, each row a list."""


async def read_images(request: Request, service: Service) -> list[Upload]:
    """The images, not decoded yet, if they are not too many."""
    options = service.options
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        try:
            async with request.form(max_files=options.max_images, max_fields=16) as form:
                files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
                uploads = [
                    Upload(file.filename or f"image {number}", await file.read())
                    for number, file in enumerate(files, start=1)
                ]
        except HTTPException as error:
            if not str(error.detail).startswith("Too many files"):
                raise
            raise ServeError(f"more than {options.max_images} images in one request: send fewer.", 413) from None
        except UnicodeError:  # charset=undefined is a codec of Python's that always raises it
            raise ServeError("the form is not in the charset that its content type names.", 400) from None
        if not uploads:
            raise ServeError("the form contains no file: send images as files, under any name.", 422)
    elif kind == "application/json":
        uploads = await service.read(_read_json, await request.body(), options)
    else:
        body = await request.body()
        if not body:
            raise ServeError(
                "the request has no body: send an image as it is, several as multipart/form-data, or JSON.", 422
            )
        uploads = [Upload("image", body)]
    _check_count(len(uploads), options.max_images)
    return uploads


def _read_json(body: bytes, options: ServeOptions) -> list[Upload]:
    document = parse_json(body)
    images = document.get("images") if isinstance(document, dict) else None
    if not isinstance(images, list) or not images or not all(isinstance(image, str) for image in images):
        raise ServeError('send {"images": ["base64 of a file", …]}, with at least one image.', 422)
    if other := next((key for key in document if key != "images"), None):
        raise ServeError(f"unknown key {other!r}: send tasks, top_k and the like as query parameters.", 422)
    _check_count(len(images), options.max_images)
    return [Upload(f"image {n}", decode_base64(image, f"image {n}")) for n, image in enumerate(images, start=1)]


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise ServeError(f"{count} images in one request; at most {most} are allowed.", 413)


def decode_base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ServeError(f"{name} is not base64.", 422) from None


def parse_json(data: bytes) -> Any:
    # The parser holds Python's lock until it is done: for 30 MB of "[]," that would be seconds.
    if data.count(b"[") + data.count(b"{") > MAX_BRACKETS:
        raise ServeError(f"the JSON has more than {MAX_BRACKETS:,} lists and objects.", 413)
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ServeError("the body is not valid JSON.", 400) from None


def decompress(data: bytes, encoding: str, most: int) -> bytes:
    """A gzip or deflate body, if it has no more than `most` bytes."""
    if encoding in {"", "identity"}:
        return data
    if encoding not in {"gzip", "deflate"}:
        raise ServeError(f"content-encoding {encoding[:20]!r} is not supported: use gzip or deflate.", 415)
    # 47: gzip or zlib by its header; -15: deflate without one, as some clients send it.
    for window in (47, -15) if encoding == "deflate" else (47,):
        stream = zlib.decompressobj(window)
        try:
            found = stream.decompress(data, most + 1)
        except zlib.error:
            continue
        if len(found) > most:
            raise ServeError(f"the body is larger than {most} bytes after decompression.", 413)
        if stream.eof:
            return found
    raise ServeError(f"the body is not valid {encoding}.", 400)


def compress(data: bytes, accepted: str) -> tuple[bytes, str | None]:
    """The data as the first of gzip and deflate that the client accepts, and which of them."""
    parts = [part.replace(" ", "").lower().partition(";") for part in accepted.split(",")]
    names = [name for name, _, weight in parts if not re.fullmatch(r"q=0(\.0*)?", weight)]
    for name, window in (("gzip", 31), ("deflate", 15)):
        if name in names:
            stream = zlib.compressobj(level=1, wbits=window)
            return stream.compress(data) + stream.flush(), name
    return data, None


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
    _check_count(shape[0], most)
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
    _check_count(given.shape[0], most)
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
