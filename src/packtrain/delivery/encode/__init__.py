"""The number of a pack -> its encoded samples: read, decoded, tokenized, and compared with what was planned.

Takes a cost table, a schedule and the data; a `PackSource` gives the `PackedRow` of a pack, whose samples a
`SampleEncoder` made. A `TokenTable` holds tokens on disk, so that later epochs do not tokenize.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.delivery.encode.encode import SampleEncoder as SampleEncoder
    from packtrain.delivery.encode.encoded_sample import EncodedSample as EncodedSample
    from packtrain.delivery.encode.encoded_sample import PackedRow as PackedRow
    from packtrain.delivery.encode.pack_source import PackSource as PackSource
    from packtrain.delivery.encode.token_cache import TokenTable as TokenTable

__getattr__, __dir__, __all__ = lazy_names(__name__)
