"""Seeds for engines that know one seed per sequence."""

from __future__ import annotations

from hashlib import blake2b


def completion_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request, in [0, 2**63). A sum would do, but for requests with neighbouring seeds."""
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()) >> 1
