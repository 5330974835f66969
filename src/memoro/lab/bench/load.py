"""The clients of `memoro lab bench serve`: python -m memoro.lab.bench.load URL CLIENTS REQUESTS SECONDS < IMAGE."""

from __future__ import annotations

import asyncio
import json
import sys
from time import perf_counter
from urllib.parse import urlsplit


async def send_requests(
    url: str, image: bytes, clients: int, requests: int, seconds: float
) -> tuple[list[float], float, float]:
    """Seconds of each request, seconds in all, and the server's mean batch.

    Each client has one connection, and sends a new request as soon as the last one is answered.
    """
    host, port = str(urlsplit(url).hostname), int(urlsplit(url).port or 80)
    head = f"POST /v1/predict HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-length: {len(image)}\r\n\r\n".encode()
    times: list[float] = []
    left = requests + clients  # the first of each client warms up
    begin = 0.0

    async def client() -> None:
        nonlocal left, begin
        reader, writer = await asyncio.open_connection(host, port)
        sent = 0
        while left > 0 and (sent < 2 or perf_counter() - begin < seconds):
            left -= 1
            start = perf_counter()
            writer.write(head + image)
            await _read_answer(reader)
            if sent:
                times.append(perf_counter() - start)
            begin = begin or perf_counter()
            sent += 1
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    wall = perf_counter() - begin
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET /metrics HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode())
    lines = (await _read_answer(reader)).decode().splitlines()
    writer.close()
    value = {row.rpartition(" ")[0]: float(row.rpartition(" ")[2]) for row in lines if not row.startswith("#")}
    return times, wall, value["memoro_batch_size_sum"] / value["memoro_batch_size_count"]


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = head.split(" ", 2)[1]
    length = next(int(line.partition(":")[2]) for line in head.splitlines() if line.startswith("content-length:"))
    body = await reader.readexactly(length)
    if status != "200":
        raise RuntimeError(f"status {status}: {body[:200].decode(errors='replace')}")
    return body


def main() -> None:
    """Prints the result as JSON."""
    url, clients, requests, seconds = sys.argv[1:]
    found = asyncio.run(send_requests(url, sys.stdin.buffer.read(), int(clients), int(requests), float(seconds)))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
