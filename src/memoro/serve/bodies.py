"""The images of a request: multipart, one image as the body, or JSON with base64."""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from memoro.errors import ServeError
from memoro.serve.options import ServeOptions
from memoro.serve.service import Service, Upload

FORMS: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {
                        "images": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
                    },
                }
            },
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {
                        "images": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "byte"}}
                    },
                }
            },
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "image/*": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
"""For OpenAPI."""
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
    _check_count(len(uploads), options)
    return uploads


def _read_json(body: bytes, options: ServeOptions) -> list[Upload]:
    document = parse_json(body)
    images = document.get("images") if isinstance(document, dict) else None
    if not isinstance(images, list) or not images or not all(isinstance(image, str) for image in images):
        raise ServeError('send {"images": ["base64 of a file", …]}, with at least one image.', 422)
    if other := next((key for key in document if key != "images"), None):
        raise ServeError(f"unknown key {other!r}: send tasks, top_k and the like as query parameters.", 422)
    _check_count(len(images), options)
    return [Upload(f"image {n}", decode_base64(image, f"image {n}")) for n, image in enumerate(images, start=1)]


def _check_count(count: int, options: ServeOptions) -> None:
    if count > options.max_images:
        raise ServeError(f"{count} images in one request; at most {options.max_images} are allowed.", 413)


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
