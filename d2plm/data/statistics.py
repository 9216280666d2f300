"""What a sequence store holds: lengths, composition and clusters, as figures, table and picture.

One pass over the store in bounded memory. Lengths are counted and not sorted, so that quartiles are
exact; cluster labels are counted a range at a time, at the price of a pass over them for each.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import batched, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.alphabet import CANONICAL, CANONICAL_START, NON_CANONICAL, RESIDUES
from d2plm.data.store import MAX_RESIDUES, SequenceStore
from d2plm.errors import DataError, require

PICTURES = (".png", ".svg", ".pdf")

_PART = 1 << 20  # values counted at once
_LABELS = 1 << 24  # cluster labels counted at once
