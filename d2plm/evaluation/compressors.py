"""General compressors as baselines: bits of held-out text given training text.

A compressor sees the training text first, so that its figure is conditional on it, as a model's is:
zstd (level 19) takes it as a prefix for each document alone, which gives each a figure; xz
(preset 9e) has no such prefix, and pays for all held-out documents together what training text and
documents need more than the training text alone. Both windows reach over everything. Whole bytes
are counted; the frame of an empty document, checksums and the container are not.
"""

import lzma
from collections.abc import Callable

import numpy as np

ZSTD, XZ = "zstd", "xz"
ZSTD_LEVEL = 19
NATS_PER_BYTE = 8 * float(np.log(2))


def zstd_scorer(known: bytes) -> Callable[[bytes], float]:
    """A function that returns the nats of a document given the text `known`."""
    import zstandard

    settings = zstandard.ZstdCompressionParameters.from_level(
        ZSTD_LEVEL,
        source_size=len(known),
        window_log=max(len(known).bit_length() + 1, zstandard.WINDOWLOG_MIN),
        format=zstandard.FORMAT_ZSTD1_MAGICLESS,
        write_content_size=False,
        write_dict_id=False,
    )
    prefix = zstandard.ZstdCompressionDict(known, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    prefix.precompute_compress(compression_params=settings)
    compressor = zstandard.ZstdCompressor(dict_data=prefix, compression_params=settings)
    frame = len(compressor.compress(b""))
    return lambda text: NATS_PER_BYTE * (len(compressor.compress(text)) - frame)


def xz_nats(known: bytes, text: bytes) -> float:
    """Nats of `text` given the text `known`."""
    window, preset = max(len(known) + len(text), 1 << 12), 9 | lzma.PRESET_EXTREME
    stream = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": window}]
    before, after = (
        len(lzma.compress(content, format=lzma.FORMAT_RAW, filters=stream))
        for content in (known, known + text)
    )
    return NATS_PER_BYTE * (after - before)
