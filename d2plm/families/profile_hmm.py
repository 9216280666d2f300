"""Profile HMMs of a protein's relatives: the baseline for a model that is given relatives.

HMMER builds a profile HMM from each single relative. Its forward score is a log-likelihood ratio,
so a mixture of the relatives' HMMs and the background is a likelihood of the protein given the
relatives, without an alignment. A family can also be modelled by one HMM of its members' alignment
(`family_hmm`), which captures their common features but depends on the alignment's quality.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyhmmer.plan7 import HMM, Background, Hit, Pipeline

from d2plm.core.vocabulary import CANONICAL, CANONICAL_START, Tokens, is_canonical
from d2plm.families.alignment import ALPHABET, digital_block, family_hmm, in_threads

BACKGROUND_SHARE = 0.02  # weight in the mixture, for proteins unlike any relative

NO_DOMAIN = 0.0  # nats of a pair for which HMMER reports no domain

Pair = tuple[int, int]


def log_ratios(
    targets: Sequence[Tokens],
    collection: Sequence[Tokens],
    pairs: Iterable[Pair],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Pair, float]:
    """log p(target | HMM of a relative) − log p(target | background), nats, of each pair.

    Pairs in which HMMER finds no domain are left out.

    Args:
        targets, collection: uint8 residue tokens.
        pairs: (index into `targets`, index into `collection`).
        progress: called with (HMMs done, their total).
    """
    of_relative: dict[int, list[int]] = defaultdict(list)
    for target, relative in pairs:
        of_relative[relative].append(target)

    def of_one(relative: int) -> dict[Pair, float]:
        hmm, own = family_hmm([collection[relative]]), of_relative[relative]
        ratios = family_log_ratios(hmm, [targets[target] for target in own])
        pairs = ((target, relative) for target in own)
        return {pair: ratio for pair, ratio in zip(pairs, ratios.tolist(), strict=True) if ratio}

    found: dict[Pair, float] = {}
    for done, ratios in enumerate(in_threads(of_one, list(of_relative)), 1):
        found |= ratios
        progress(done, len(of_relative))
    return found


def family_log_ratios(hmm: HMM, targets: Sequence[Tokens]) -> NDArray[np.float64]:
    """float64 [N]: log p(target | the HMM) − log p(target | background), nats, or NO_DOMAIN."""
    ratios = np.full(len(targets), NO_DOMAIN)
    for target, hit in domain_hits(hmm, targets, null2=False).items():
        ratios[target] = hit.pre_score * math.log(2)
    return ratios


def domain_hits(hmm: HMM, proteins: Sequence[Tokens], **settings: Any) -> dict[int, Hit]:
    """Index of a protein → its hit, if HMMER finds a domain without any filter."""
    pipeline = Pipeline(hmm.alphabet, bias_filter=False, F1=1.0, F2=1.0, F3=1.0, T=-1e6, **settings)
    hits = pipeline.search_hmm(hmm, digital_block(proteins))
    return {int(hit.name): hit for hit in hits}


def mixture_nats(
    targets: Sequence[Tokens], relatives: Sequence[Sequence[int]], ratios: dict[Pair, float]
) -> NDArray[np.float64]:
    """float64 [N]: −log p of each target's canonical residues given its relatives.

    p = 0.98 · the mean over the relatives' HMMs + 0.02 · the background; the background alone
    without relatives.

    Args:
        relatives: indices of the relatives of each target.
        ratios: from `log_ratios`.
    """
    nats = _background_nats(targets)
    for target, own in enumerate(relatives):
        if len(own):
            each = [ratios.get((target, relative), NO_DOMAIN) for relative in own]
            log_mean = float(np.logaddexp.reduce(each)) - math.log(len(own))
            nats[target] -= _with_background(log_mean)
    return nats


def alignment_nats(
    targets: Sequence[Tokens],
    relatives: Sequence[Sequence[Tokens]],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NDArray[np.float64]:
    """float64 [N]: −log p of each target's residues given one HMM of its relatives' alignment.

    p = 0.98 · the HMM of `family_hmm` + 0.02 · the background, as in `mixture_nats`.

    Args:
        targets: uint8 residue tokens.
        relatives: relatives of each target.
        progress: called with (targets done, their total).
    """

    def ratio(own: tuple[Tokens, Sequence[Tokens]]) -> float:
        return float(family_log_ratios(family_hmm(own[1]), [own[0]])[0]) if len(own[1]) else 0.0

    nats = _background_nats(targets)
    pairs = list(zip(targets, relatives, strict=True))
    for target, found in enumerate(in_threads(ratio, pairs)):
        nats[target] -= _with_background(found)
        progress(target + 1, len(targets))
    return nats


def members_nats(members: Sequence[Tokens], targets: Sequence[Tokens]) -> NDArray[np.float64]:
    """float64 [N]: `alignment_nats` with one HMM of all the members for all targets."""
    ratios = family_log_ratios(family_hmm(members), targets).tolist()
    return _background_nats(targets) - [_with_background(ratio) for ratio in ratios]


def _with_background(log_ratio: float) -> float:
    """log(0.98 · p + 0.02 · background) − log background, from log p − log background."""
    given = math.log(1 - BACKGROUND_SHARE) + log_ratio
    return float(np.logaddexp(given, math.log(BACKGROUND_SHARE)))


def _background_nats(targets: Sequence[Tokens]) -> NDArray[np.float64]:
    nats = -np.log(amino_frequencies())
    residues = (tokens[is_canonical(tokens)].astype(int) - CANONICAL_START for tokens in targets)
    return np.array([float(nats[own].sum()) for own in residues])


def amino_frequencies() -> NDArray[np.float64]:
    """float64 [20]: HMMER's background frequencies in the order of `CANONICAL`."""
    frequencies = np.array(Background(ALPHABET).residue_frequencies, dtype=float)
    by_letter = dict(zip(ALPHABET.symbols, frequencies / frequencies.sum(), strict=False))
    return np.array([by_letter[letter] for letter in CANONICAL])
