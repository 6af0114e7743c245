"""What the server accepts: options of ``kd-serve``."""

from typing import Annotated

from kd.config.kinds import Checked, Range


class Limits(Checked):
    """What the server accepts; a request beyond it is refused with a status and a reason."""

    max_batch: Annotated[int, Range(">= 1")] = 16
    """Pictures that the model runs at a time."""
    max_wait_ms: Annotated[float, Range(">= 0")] = 2.0
    """Milliseconds that a batch waits for more pictures."""
    queue: Annotated[int, Range(">= 1")] = 512
    """Pictures, and requests, at a time: more are answered 503, Retry-After."""
    timeout_s: Annotated[float, Range("> 0")] = 30.0
    """Of a request, from its headers to its answer."""
    max_upload_mb: Annotated[float, Range("> 0")] = 16.0
    """Of a request's body, in MB of 10**6 bytes; 16 times as much of all bodies together."""
    max_pixels: Annotated[int, Range(">= 1")] = 40_000_000
    """Of a decoded picture."""
    max_pictures: Annotated[int, Range(">= 1")] = 32
    """Of a request."""
    decoders: Annotated[int, Range(">= 1")] = 2
    """Threads that decode and scale pictures, and read JSON."""
