"""What puts cost in simulated time, and how much a rank has put.

A network interface carries one put after the other, so its time is a sum, whatever order the puts land in. It is an
account beside the schedule: virtual time, of which nothing passes while anybody can move, does not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NetworkCost:
    """A put keeps the interface of its rank busy for ``per_put_ns + num_bytes * per_byte_ns`` nanoseconds.

    Attributes:
        per_put_ns: the inverse of the rate of messages.
        per_byte_ns: the inverse of the bandwidth; 0.02 are 50 GB/s.

    Raises:
        ValueError: a cost is negative.

    Numeric example: 200 ns a put and 0.02 ns a byte make 220 ns of a put of 1000 bytes.
    """

    per_put_ns: float = 0.0
    per_byte_ns: float = 0.0

    def __post_init__(self) -> None:
        if self.per_put_ns < 0 or self.per_byte_ns < 0:
            raise ValueError(f"costs of a network must not be negative, got {self}")

    def of(self, num_bytes: int) -> float:
        """Nanoseconds of a put."""
        return self.per_put_ns + num_bytes * self.per_byte_ns


@dataclass(frozen=True)
class NetworkUse:
    """What a rank has put so far, to one peer or to all.

    Attributes:
        puts: how many.
        num_bytes: of all of them.
        time_ns: that its interface was busy with them.
    """

    puts: int = 0
    num_bytes: int = 0
    time_ns: float = 0.0

    def __add__(self, other: NetworkUse) -> NetworkUse:
        return NetworkUse(self.puts + other.puts, self.num_bytes + other.num_bytes, self.time_ns + other.time_ns)

    def __sub__(self, other: NetworkUse) -> NetworkUse:
        return NetworkUse(self.puts - other.puts, self.num_bytes - other.num_bytes, self.time_ns - other.time_ns)
