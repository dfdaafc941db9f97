"""A shuffle without a list: where the n-th of many things goes, computed from n alone. Pure; it knows no tasks.

A shuffled list costs memory and a pause an epoch, and a resume has to shuffle again up to where it was. Here nothing is
kept, so that a stream of tasks has no state at all: position n says everything.

A Feistel network of `ROUNDS` rounds permutes the 2^(2h) numbers of 2h bits, with 2^(2h) >= size; a number that falls
outside is permuted again until it falls inside (cycle walking), at most 4 times in the mean.
Black, Rogaway: Ciphers with arbitrary finite domains, CT-RSA 2002.
"""

import hashlib

ROUNDS = 6


def permuted(index: int, size: int, key: str) -> int:
    """Where `index` in [0, size) goes; for each key another permutation of [0, size).

    >>> sorted(permuted(index, 5, "seed 0") for index in range(5))
    [0, 1, 2, 3, 4]
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is not in [0, {size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(key.encode(), digest_size=32).digest()
    place = _feistel(index, half_bits, digest)
    while place >= size:
        place = _feistel(place, half_bits, digest)
    return place


def _feistel(number: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = number >> half_bits, number & mask
    for turn in range(ROUNDS):
        mixed = hashlib.blake2b(f"{turn}/{right}".encode(), key=key, digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(mixed) & mask)
    return left << half_bits | right


def fraction(key: str) -> float:
    """A number in [0, 1) that depends on the key alone.

    >>> 0.0 <= fraction("seed 0") < 1.0
    True
    """
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) / 2**64
