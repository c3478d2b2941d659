"""Hashes that find equal rows and similar images, computed for whole blocks at once."""

import hashlib
import math

import numpy as np
import numpy.typing as npt
import pandas as pd

NARROW = 256
"""The most bytes of a row for which pandas hashes whole columns, which takes a quarter of the time for 100 bytes."""
LOWEST = 8
"""The number of lowest frequencies along each side of an image that its hash uses."""
FAR_BITS = 3
"""The most bits in which the hashes of similar images may differ."""
NEIGHBOURS = 8
MOST_PAIRS = 200_000
CLOSE = 0.99
"""Two images are near duplicates if the correlation of their pixels is at least this."""
Floats = npt.NDArray[np.float32]
Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]


def of_rows(block: npt.NDArray[np.generic], salt: int = 0) -> Hashes:
    """Return a 64-bit hash of the bytes of each row of a block, (n, *shape) -> uint64 (n,).

    Args:
        salt: gives the same rows different hashes in different features.
    """
    rows = np.ascontiguousarray(block.reshape(len(block), -1)).view(np.uint8)
    if rows.shape[1] > NARROW:
        digests = b"".join(hashlib.blake2b(row, digest_size=8, salt=bytes([salt % 256])).digest() for row in rows)
        return np.frombuffer(digests, np.uint64)
    words = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8))).view(np.uint64)
    found: Hashes = pd.util.hash_pandas_object(pd.DataFrame(words), index=False).to_numpy()
    return found * np.uint64(2 * salt + 1)


def greys(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Return the sum of the colours of each pixel, (n, height, width, channels) -> uint16 (n, height, width)."""
    found = images[..., 0].astype(np.uint16)  # Channel by channel is much faster than `sum`.
    for channel in range(1, min(3, images.shape[3])):
        found += images[..., channel]
    return found


def _waves(size: int) -> Floats:
    """Return the lowest basis functions of the orthonormal DCT-II along a side, (waves, size)."""
    number = np.arange(min(LOWEST, size))[:, np.newaxis]
    waves: npt.NDArray[np.floating] = np.cos(np.pi * number * (np.arange(size) + 0.5) / size) * np.sqrt(2 / size)
    waves[0] /= np.sqrt(2)
    return waves.astype(np.float32)


class Look:
    """Perceptual hashes and other properties of images of one size.

    The hash is pHash: which of the lowest frequencies of an image are above their median (C. Zauner, Implementation and
    Benchmarking of Perceptual Image Hash Functions, 2010; here for the whole image, not for one resized to 32 x 32).
    """

    def __init__(self, height: int, width: int) -> None:
        self._down, self._across = _waves(height), _waves(width).T

    def waves(self, sums: npt.NDArray[np.uint16]) -> Floats:
        """Return the lowest frequencies of images, given their ``greys``, as float32 (n, k)."""
        found: Floats = self._down @ sums.astype(np.float32) @ self._across
        return found.reshape(len(sums), found.shape[1] * found.shape[2])

    def of(self, images: npt.NDArray[np.uint8]) -> tuple[Hashes, npt.NDArray[np.int8], Floats, Floats]:
        """Return the properties of images, uint8 (n, height, width, channels):

        their hashes, uint64 (n,); the share of the standard deviation at each frequency, in 127ths, int8 (n, k); mean
        and standard deviation of their grey values, float32 (n,) each; the latter is 0 if all pixels are equal.
        """
        sums, size = greys(images), math.prod(images.shape[1:3])
        pixels, waves = sums.reshape(len(images), size), self.waves(sums)[:, 1:]
        mean = np.einsum("ij->i", pixels, dtype=np.int64, casting="unsafe") / size
        squares = np.einsum("ij,ij->i", pixels, pixels, dtype=np.int64, casting="unsafe") / size
        is_flat = (pixels == pixels[:, :1]).all(axis=1)
        contrast = np.where(is_flat, 0, np.sqrt(np.maximum(squares - np.square(mean), 1e-6)))
        middle = waves.shape[1] // 2
        bits = np.zeros((len(images), LOWEST * LOWEST), bool)
        if waves.shape[1]:
            bits[:, : waves.shape[1]] = waves > np.partition(waves, middle, axis=1)[:, middle, np.newaxis]
        hashes = np.packbits(bits, axis=1).view(">u8").ravel().astype(np.uint64)
        parts = waves / np.maximum(contrast * np.sqrt(size), 1e-3)[:, np.newaxis]
        coarse = np.rint(np.clip(parts, -1, 1) * 127).astype(np.int8)
        num_channels = min(3, images.shape[3])
        return hashes, coarse, (mean / num_channels).astype(np.float32), (contrast / num_channels).astype(np.float32)


def equal_to_earlier(hashes: Hashes) -> tuple[Rows, Rows]:
    """Return the ascending places of hashes that also occur at an earlier place, and their first places."""
    ordered = np.sort(hashes)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    some = np.flatnonzero(np.isin(hashes, repeated)) if len(repeated) else np.zeros(0, np.int64)
    _, firsts, numbers = np.unique(hashes[some], return_index=True, return_inverse=True)
    twins = some[firsts[numbers]]
    later = twins != some
    return some[later], twins[later]


def pairs(hashes: Hashes, coarse: npt.NDArray[np.int8]) -> tuple[Rows, bool]:
    """Return pairs of places with similar hashes, int64 (pairs, 2), the smaller first, at most ``MOST_PAIRS``;
    and whether there were more.

    It compares neighbours in four tables, each sorted by another quarter of the hash first (G. Manku, A. Jain, A. Das
    Sarma, Detecting Near-Duplicates for Web Crawling, WWW 2007): hashes that differ in three bits have one equal
    quarter. If many hashes share a quarter, it compares only some of them: work grows as n log n.
    """
    found = [np.zeros(0, np.int64)]
    for quarter in range(4):
        turn = np.uint64(16 * quarter)
        turned = (hashes << turn) | (hashes >> (np.uint64(64) - turn)) if quarter else hashes
        order = np.argsort(turned, kind="stable")
        ordered = hashes[order]
        for step in range(1, min(NEIGHBOURS + 1, len(order))):
            near = np.flatnonzero(np.bitwise_count(ordered[:-step] ^ ordered[step:]) <= FAR_BITS)
            first, second = order[near], order[near + step]
            found.append(np.minimum(first, second) * len(hashes) + np.maximum(first, second))
    every = np.stack(np.divmod(np.unique(np.concatenate(found)), max(1, len(hashes))), axis=1)
    apart = np.concatenate(
        [
            np.square(coarse[some[:, 0]].astype(np.int32) - coarse[some[:, 1]]).sum(axis=1)
            for some in np.array_split(every, 1 + len(every) // 10_000)
        ]
    )
    # The squared distance of two unit vectors whose dot product, the correlation, is CLOSE; 0.002 is for rounding.
    every = every[apart <= (2 * (1 - CLOSE) + 0.002) * 127**2]
    return every[:MOST_PAIRS], len(every) > MOST_PAIRS


def correlation(first: Floats, second: Floats) -> Floats:
    """Return the correlation of the grey values of images, (n, pixels) each -> float32 (n,): 1 if they differ only in
    brightness and contrast."""
    first, second = (one - one.mean(axis=1, keepdims=True) for one in (first, second))
    lengths = np.sqrt(np.einsum("ij,ij->i", first, first) * np.einsum("ij,ij->i", second, second))
    found: Floats = np.einsum("ij,ij->i", first, second) / np.maximum(lengths, 1e-6)
    return found
