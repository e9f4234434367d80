"""A load generator that costs less than what it measures: raw connections, requests made beforehand."""

import asyncio
import dataclasses
import time


@dataclasses.dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
      name: for tables.
      port: on 127.0.0.1.
      path, headers: of every request.
    """

    name: str
    port: int
    path: str
    headers: tuple[tuple[str, str], ...] = ()

    def request(self, body: bytes) -> bytes:
        """The bytes of one POST."""
        lines = [f"POST {self.path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json",
                 f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in self.headers)]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclasses.dataclass(frozen=True)
class Load:
    """What a load measured. Times in seconds, one per request.

    Attributes:
      latencies_s: request sent to last byte.
      first_s: request sent to the first byte of the first mark, where one was looked for.
      wall_s: of the whole load.
    """

    latencies_s: list[float]
    first_s: list[float]
    wall_s: float

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.wall_s


async def run(target: Target, bodies: list[bytes], concurrency: int, mark: bytes = b"") -> Load:
    """Sends all bodies over `concurrency` connections, each one request at a time.

    Raises:
      RuntimeError: an answer that is no 200.
    """
    waiting = iter([target.request(b) for b in bodies])
    latencies_s: list[float] = []
    first_s: list[float] = []

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1 << 22)
        for request in waiting:
            began = time.perf_counter()
            writer.write(request)
            seen = await _answer(reader, mark, target.name)
            latencies_s.append(time.perf_counter() - began)
            if seen is not None:
                first_s.append(seen - began)
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return Load(latencies_s, first_s, time.perf_counter() - began)


async def _answer(reader: asyncio.StreamReader, mark: bytes, name: str) -> float | None:
    """Reads one answer. Returns when `mark` was first seen."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head[:16]:
        raise RuntimeError(f"{name} answered {head.splitlines()[0].decode()}: {(await reader.read(500))!r}")
    if b"content-length:" in head:
        size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(size)
        return None
    seen, text = None, b""
    while True:  # chunked
        size = int(await reader.readuntil(b"\r\n"), 16)
        chunk = await reader.readexactly(size + 2)
        if mark and seen is None:
            text += chunk[:-2]
            if mark in text:
                seen = time.perf_counter()
        if size == 0:
            return seen
