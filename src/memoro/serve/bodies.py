"""The bodies of requests and answers: images, JSON, and the tensors of the Open Inference Protocol."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
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
                uploads = [(file.filename or f"image {n}", await file.read()) for n, file in enumerate(files, start=1)]
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
        uploads = [("image", body)]
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
    return [(f"image {n}", decode_base64(image, f"image {n}")) for n, image in enumerate(images, start=1)]


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
            expanded = stream.decompress(data, most + 1)
        except zlib.error:
            continue
        if len(expanded) > most:
            raise ServeError(f"the body is larger than {most} bytes after decompression.", 413)
        if stream.eof:
            return expanded
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


class Parameters(BaseModel):
    """Those that are known, of a request, an input or an output."""

    binary_data_size: Annotated[int, Field(strict=True, ge=0)] | None = None
    """Bytes of an input; they follow the JSON."""
    binary_data_output: bool = False
    """Whether outputs that do not say otherwise are sent as bytes."""
    binary_data: bool | None = None
    classification: Annotated[int, Field(strict=True, ge=0, le=100_000)] = 0
    """How many classes of an output are asked for; 0: the tensor itself."""


class InferInput(BaseModel):
    """The input of a request: pixels, or encoded images."""

    name: Literal["pixel_values", "image"]
    shape: list[Annotated[int, Field(strict=True, gt=0, lt=1 << 31)]]
    datatype: str
    data: Any = None
    """Bytes if they followed the JSON."""
    parameters: Parameters = Parameters()


class InferOutput(BaseModel):
    """An output that is asked for."""

    name: str
    parameters: Parameters = Parameters()


class InferRequest(BaseModel):
    """What a client sent."""

    id: str | None = None
    inputs: list[InferInput] = Field(min_length=1, max_length=1)
    outputs: list[InferOutput] = []
    parameters: Parameters = Parameters()


def read_request(body: bytes, header_length: str | None) -> InferRequest:
    """The request of a body: JSON, then the bytes of a binary input."""
    length = len(body)
    if header_length is not None:
        if not header_length.isdecimal() or len(header_length) > 12 or not 0 < int(header_length) <= len(body):
            raise ServeError("Inference-Header-Content-Length is not the length of the JSON.", 400)
        length = int(header_length)
    try:
        request = InferRequest.model_validate(parse_json(body[:length]))
    except ValidationError as error:
        raise ServeError(first_problem(error.errors(include_input=False)), 400) from None
    size = request.inputs[0].parameters.binary_data_size
    if len(body) != length + (size or 0):
        raise ServeError("binary_data_size is not the number of bytes after the JSON.", 400)
    if size is not None:
        request.inputs[0].data = body[length:]
    return request


def first_problem(errors: Sequence[Any], outside: int = 0) -> str:
    """The first of pydantic's errors; the place of a value without its `outside` parts."""
    place = ".".join(map(str, errors[0]["loc"][outside:])) or "the JSON"
    unknown = errors[0]["type"] == "extra_forbidden"
    return f"{place}: {'there is no such parameter or field; /docs lists all.' if unknown else errors[0]['msg']}"


def read_pixels(entry: InferInput, channels: int, most: int, side: int) -> Tensor:
    """(n, channels, height, width) float32, if the shape is allowed and all values can be pixels."""
    shape = entry.shape
    if entry.datatype != "FP32" or len(shape) != 4 or shape[1] != channels or max(shape[2:]) > side:
        raise ServeError(
            f"pixel_values must be FP32 of shape [images, {channels}, height, width], at most {side} a side.", 400
        )
    _check_count(shape[0], most)
    count = math.prod(shape)
    try:
        if isinstance(entry.data, bytes):
            values = np.frombuffer(entry.data, dtype="<f4")
        else:
            values = np.asarray(entry.data, dtype=np.float32).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        raise ServeError("the data of pixel_values must be numbers.", 400) from None
    if values.size != count:
        raise ServeError(f"pixel_values has {values.size} numbers; its shape needs {count}.", 400)
    if not (np.abs(values) <= MAX_PIXEL).all():  # NaN fails too
        raise ServeError(f"pixel_values must be finite numbers of at most {MAX_PIXEL:,.0f} in absolute value.", 400)
    return torch.from_numpy(values.reshape(shape).copy())


def read_files(entry: InferInput, most: int) -> list[bytes]:
    """The encoded images of a BYTES input: length-prefixed in binary, base64 in JSON."""
    if entry.datatype != "BYTES" or len(entry.shape) not in {1, 2} or math.prod(entry.shape) != entry.shape[0]:
        raise ServeError("image must be BYTES of shape [images] or [images, 1].", 400)
    _check_count(entry.shape[0], most)
    if isinstance(entry.data, bytes):
        files, at = [], 0
        while at + 4 <= len(entry.data):
            end = at + 4 + int.from_bytes(entry.data[at : at + 4], "little")
            files.append(entry.data[at + 4 : end])
            at = end
        if at != len(entry.data):
            raise ServeError("the bytes of image are not length-prefixed files.", 400)
    else:
        rows = entry.data if isinstance(entry.data, list) else [None]
        texts: list[Any] = [text for row in rows for text in (row if isinstance(row, list) else [row])]
        if not all(isinstance(text, str) for text in texts):
            raise ServeError("the data of image must be base64 strings.", 400)
        files = [decode_base64(text, f"image {number}") for number, text in enumerate(texts, start=1)]
    if len(files) != entry.shape[0]:
        raise ServeError(f"image has {len(files)} files; its shape says {entry.shape[0]}.", 400)
    return files


Output = Tensor | list[list[str]] | list[str]


def write_outputs(
    head: Mapping[str, Any], outputs: Sequence[tuple[str, Output, bool]]
) -> tuple[dict[str, Any], list[bytes]]:
    """The JSON of a response, and the bytes of those outputs that are to be binary."""
    entries: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for name, value, binary in outputs:
        values = value.numpy() if isinstance(value, Tensor) else np.array(value, dtype=object)
        text = not isinstance(value, Tensor)
        entry: dict[str, Any] = {"name": name, "datatype": "BYTES" if text else "FP32", "shape": list(values.shape)}
        if not binary:
            entry["data"] = values.ravel().tolist()
        else:
            encoded = [one.encode(errors="backslashreplace") for one in values.flat] if text else []
            prefixed = b"".join(len(one).to_bytes(4, "little") + one for one in encoded)
            tail.append(prefixed if text else values.astype("<f4").tobytes())
            entry["parameters"] = {"binary_data_size": len(tail[-1])}
        entries.append(entry)
    return {**head, "outputs": entries}, tail
