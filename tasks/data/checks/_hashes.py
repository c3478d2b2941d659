"""Numbers by which equal rows, and images that look alike, are found: of whole blocks at once."""

import math

import numpy as np
import numpy.typing as npt

LOWEST = 8
"""Frequencies of each side of an image, of which its hash is made."""
FAR_BITS = 3
"""Hashes that differ in so many bits may be of images that look alike."""
NEIGHBOURS = 8
MOST_PAIRS = 200_000
CLOSE = 0.99
"""The correlation of the pixels of two images from which on they are one picture."""
Floats = npt.NDArray[np.float32]
Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]


def _mixed(words: Hashes) -> Hashes:
    """Return each word mixed, so that each bit depends on all: the finaliser of MurmurHash3 (A. Appleby, 2011)."""
    words = words ^ (words >> np.uint64(33))
    words *= np.uint64(0xFF51AFD7ED558CCD)
    words ^= words >> np.uint64(33)
    words *= np.uint64(0xC4CEB9FE1A85EC53)
    words ^= words >> np.uint64(33)
    return words


def of_rows(block: npt.NDArray[np.generic], salt: int = 0) -> Hashes:
    """Return 64 bits for each row of a block, (n, *shape) -> uint64 (n,), equal where the bytes of two rows are.

    Each word of a row is mixed with a number of its place, and their sum is the hash. The chance that any two
    different rows of a million have the same one is 3e-8.

    Args:
        salt: another one gives the same rows other hashes, as those of another feature.
    """
    raw = np.ascontiguousarray(block.reshape(len(block), -1)).view(np.uint8)
    if missing := -raw.shape[1] % 8:
        raw = np.pad(raw, ((0, 0), (0, missing)))
    words = raw.view(np.uint64)
    of_place = np.random.Philox(key=[salt, 1]).random_raw(words.shape[1])
    return _mixed(_mixed(words ^ of_place).sum(axis=1, dtype=np.uint64))


def greys(images: npt.NDArray[np.uint8]) -> Floats:
    """Return the mean of the colours of each pixel, (n, height, width, channels) -> float32 (n, height * width)."""
    colours = images[..., :3] if images.shape[-1] == 4 else images
    channels, flat = colours.shape[-1], (len(images), math.prod(images.shape[1:3]))
    if channels == 1:
        return colours.reshape(flat).astype(np.float32)
    total = colours[..., 0].astype(np.uint16)  # Five times as fast as NumPy's mean of the last axis.
    for channel in range(1, channels):
        total += colours[..., channel]
    return total.reshape(flat).astype(np.float32) / np.float32(channels)


def _waves(size: int) -> npt.NDArray[np.floating]:
    """Return the lowest waves of the orthonormal DCT-II of a side, (waves, size)."""
    number = np.arange(min(LOWEST, size))[:, np.newaxis]
    waves: npt.NDArray[np.floating] = np.cos(np.pi * number * (np.arange(size) + 0.5) / size) * np.sqrt(2 / size)
    waves[0] /= np.sqrt(2)
    return waves


class Look:
    """What images of one size look like from afar.

    The hash is pHash: of the lowest frequencies of an image, which are above their median (C. Zauner, Implementation
    and Benchmarking of Perceptual Image Hash Functions, 2010; here of the whole image, not of one shrunk to 32 x 32).
    """

    def __init__(self, height: int, width: int) -> None:
        down, across = _waves(height), _waves(width)
        self._waves = np.kron(down, across).T.astype(np.float32)

    def waves(self, images: npt.NDArray[np.uint8]) -> Floats:
        """Return the lowest frequencies of images, uint8 (n, height, width, channels) -> float32 (n, k)."""
        found: Floats = greys(images) @ self._waves
        return found

    def of(self, images: npt.NDArray[np.uint8]) -> tuple[Hashes, npt.NDArray[np.int8], Floats, Floats]:
        """Return of images, uint8 (n, height, width, channels):

        their hashes, uint64 (n,); how much of its deviation each has at each frequency, in 127ths, int8 (n, k); the
        mean of its greys and their standard deviation, float32 (n,) each; the latter is 0 where all pixels are equal.
        """
        grey = greys(images)
        size = grey.shape[1]
        waves = grey @ self._waves
        brightness, waves = waves[:, 0] / np.float32(np.sqrt(size)), waves[:, 1:]
        squares = np.einsum("ij,ij->i", grey, grey) / np.float32(size)
        contrast = np.sqrt(np.maximum(squares - brightness**2, 0))
        low = np.flatnonzero(contrast < 1)  # Near 0, what rounding leaves must not count.
        flat = images[low].reshape(len(low), math.prod(images.shape[1:]))
        contrast[low] = np.where((flat == flat[:, :1]).all(axis=1), 0, np.maximum(contrast[low], 1e-3))
        middle = waves.shape[1] // 2
        bits = np.zeros((len(images), LOWEST * LOWEST), bool)
        if waves.shape[1]:
            bits[:, : waves.shape[1]] = waves > np.partition(waves, middle, axis=1)[:, middle, np.newaxis]
        hashes = np.packbits(bits, axis=1).view(">u8").ravel().astype(np.uint64)
        parts = waves / np.maximum(contrast * np.float32(np.sqrt(size)), 1e-3)[:, np.newaxis]
        return hashes, np.rint(np.clip(parts, -1, 1) * 127).astype(np.int8), brightness, contrast


def equal_to_earlier(hashes: Hashes) -> tuple[Rows, Rows]:
    """Return the places of hashes that an earlier place has, rising, and the first place of each of these."""
    _, firsts, numbers = np.unique(hashes, return_index=True, return_inverse=True)
    twins = firsts[numbers]
    later = np.flatnonzero(twins != np.arange(len(hashes)))
    return later, twins[later]


def pairs(hashes: Hashes, coarse: npt.NDArray[np.int8], most: int = MOST_PAIRS) -> tuple[Rows, bool]:
    """Return pairs of places that may look alike, int64 (pairs, 2), the smaller first, ``most`` of them;
    and whether there were more.

    Of each of four tables, sorted by another quarter of the hash first, neighbours are compared (G. Manku, A. Jain, A.
    Das Sarma, Detecting Near-Duplicates for Web Crawling, WWW 2007): of hashes that differ in three bits, one quarter
    is equal. Where more than a few have one quarter in common, not all of them are compared: work grows as n log n.
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
    # Two vectors of length 1 are so far apart where their product, the correlation, is CLOSE; and what rounding leaves.
    every = every[apart <= (2 * (1 - CLOSE) + 0.002) * 127**2]
    return every[:most], len(every) > most


def correlation(first: Floats, second: Floats) -> Floats:
    """Return how alike the greys of images are, (n, pixels) each -> float32 (n,): 1 where they differ in brightness and
    contrast alone."""
    first, second = (one - one.mean(axis=1, keepdims=True) for one in (first, second))
    lengths = np.sqrt(np.einsum("ij,ij->i", first, first) * np.einsum("ij,ij->i", second, second))
    found: Floats = np.einsum("ij,ij->i", first, second) / np.maximum(lengths, 1e-6)
    return found
