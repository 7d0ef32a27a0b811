"""The law of what a piece of code emits: exactly, by following every branch of its draws, or by counting."""

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from unittest.mock import patch

import torch
from torch import Tensor

from specdec import generate
from specdec.verify import verify_tokens

Law = dict[Hashable, float]

TOLERANCE = 1e-12  # of every exact law; the errors of float64 stay a thousand times below
DEVIATIONS: list[float] = []  # of every law that `assert_exact` compared, for the last line of a test run


# Following every branch


class EnumeratingChooser:
    """Replays a path of choices, then takes the first possible branch everywhere and notes the others.

    Raises:
        ValueError: what it is asked is no probability or no law, or a replay meets another question than the path was noted for.
    """

    def __init__(self, path: tuple[tuple[int, float], ...] = ()) -> None:
        self.path = path  # choices, each with its probability
        self.probability = 1.0
        self.other_paths: list[tuple[tuple[int, float], ...]] = []
        self.taken: tuple[tuple[int, float], ...] = ()

    def bernoulli(self, probability: float) -> bool:
        return self._choose([1 - probability, probability]) == 1

    def categorical(self, weights: Tensor) -> int:
        weights = weights.double()
        return self._choose((weights / weights.sum()).tolist())

    def _choose(self, probabilities: Sequence[float]) -> int:
        if not all(probability >= 0 for probability in probabilities):  # nor NaN
            raise ValueError(f"{probabilities} are no probabilities")
        step = len(self.taken)
        if step < len(self.path):
            choice, probability = self.path[step]
            if choice >= len(probabilities) or probabilities[choice] != probability:
                raise ValueError(f"the replay of {self.path} met {probabilities} at step {step}")
        else:
            choice, *others = [i for i, probability in enumerate(probabilities) if probability > 0]
            self.other_paths += [(*self.taken, (other, probabilities[other])) for other in others]
        self.taken += ((choice, probabilities[choice]),)
        self.probability *= probabilities[choice]
        return choice


class OneUniform(EnumeratingChooser):
    """A generator that is seeded anew before a draw of the kinds in `reseeded`, and so gives the same uniform number each time.

    The number is known to lie in an interval, which every such draw narrows down. Kinds: "test", "draw".
    """

    reseeded: tuple[str, ...] = ("test", "draw")

    def __init__(self, path: tuple[tuple[int, float], ...] = ()) -> None:
        super().__init__(path)
        self.interval = (0.0, 1.0)

    def bernoulli(self, probability: float) -> bool:
        if "test" not in self.reseeded:
            return super().bernoulli(probability)
        return self._narrow([probability, 1 - probability]) == 0  # u < probability

    def categorical(self, weights: Tensor) -> int:
        if "draw" not in self.reseeded:
            return super().categorical(weights)
        return self._narrow((weights.double() / weights.double().sum()).tolist())

    def _narrow(self, probabilities: Sequence[float]) -> int:
        low, high = self.interval
        ends = [0.0, *itertools.accumulate(probabilities)]
        pieces = [(max(low, a), min(high, b)) for a, b in itertools.pairwise(ends)]
        choice = self._choose([max(0.0, b - a) / (high - low) for a, b in pieces])
        self.interval = pieces[choice]
        return choice


class TestReused(OneUniform):
    """The uniform number of a test serves the draw behind it too; all other draws are fresh."""

    __test__ = False  # no test class, pytest

    def bernoulli(self, probability: float) -> bool:
        self.interval = (0.0, 1.0)
        return super().bernoulli(probability)

    def categorical(self, weights: Tensor) -> int:
        choice = super().categorical(weights)
        self.interval = (0.0, 1.0)
        return choice


def exact_law(
    run: Callable[[EnumeratingChooser], Hashable], chooser: type[EnumeratingChooser] = EnumeratingChooser
) -> Law:
    """The probability of every outcome of `run(chooser)`, depth first over all its draws.

    Raises:
        ValueError: as `EnumeratingChooser`; or a path that ends early, or probabilities whose sum is not 1.
    """
    law: Law = defaultdict(float)
    waiting: list[tuple[tuple[int, float], ...]] = [()]
    while waiting:
        path = chooser(waiting.pop())
        law[run(path)] += path.probability
        if len(path.taken) < len(path.path):
            raise ValueError(f"the replay of {path.path} ended after {len(path.taken)} steps")
        waiting += path.other_paths
    total = math.fsum(law.values())
    if not abs(total - 1) < TOLERANCE:
        raise ValueError(f"the probabilities of a law sum to {total}")
    return dict(law)


def largest_difference(a: Mapping[Hashable, float], b: Mapping[Hashable, float]) -> float:
    return max(abs(a.get(outcome, 0.0) - b.get(outcome, 0.0)) for outcome in a.keys() | b.keys())


def assert_exact(law: Mapping[Hashable, float], expected: Mapping[Hashable, float]) -> None:
    """The law is the expected one to 1e-12 in every outcome, and nothing impossible is ever emitted."""
    assert all(expected.get(outcome, 0.0) > 0 for outcome, probability in law.items() if probability > 0)
    deviation = largest_difference(law, expected)
    DEVIATIONS.append(deviation)
    assert deviation < TOLERANCE


def total_variation(a: Mapping[Hashable, float], b: Mapping[Hashable, float]) -> float:
    """Half the L1 distance of two laws."""
    return math.fsum(abs(a.get(outcome, 0.0) - b.get(outcome, 0.0)) for outcome in a.keys() | b.keys()) / 2


# One round of a verifier


class Laws:
    """A law of the next token for every text of up to `depth` tokens."""

    def __init__(self, vocabulary: int, depth: int, make_law: Callable[[], Tensor]) -> None:
        self.vocabulary = vocabulary
        self.texts = {t: make_law() for n in range(depth + 1) for t in itertools.product(range(vocabulary), repeat=n)}

    def after(self, text: Sequence[int]) -> Tensor:
        return self.texts[tuple(text)]

    def along(self, text: Sequence[int], count: int) -> Tensor:
        """The laws after the first 0, 1, ... tokens of a text, shape (count, V)."""
        return torch.stack([self.after(text[:n]) for n in range(count + 1)])[:count]

    def of_texts(self, length: int, start: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
        """The probability of every text of `length` tokens that begins with `start`, given `start`."""
        endings = itertools.product(range(self.vocabulary), repeat=max(0, length - len(start)))
        texts = [start + ending for ending in endings]
        return {t: math.prod(float(self.after(t[:n])[t[n]]) for n in range(len(start), length)) for t in texts}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Laws":
        changed = Laws(self.vocabulary, -1, lambda: torch.empty(0))
        changed.texts = {text: change(law) for text, law in self.texts.items()}
        return changed


def random_laws(vocabulary: int, depth: int, seed: int, zeros: bool = False) -> Laws:
    """Uneven laws in float64; with `zeros`, about half of all tokens are impossible."""
    generator = torch.Generator().manual_seed(seed)

    def make_law() -> Tensor:
        weights = torch.rand(vocabulary, generator=generator, dtype=torch.float64) ** 3
        if zeros:
            kept = torch.rand(vocabulary, generator=generator) < 0.5
            kept[int(torch.randint(vocabulary, (1,), generator=generator))] = True
            weights = weights * kept
        return weights / weights.sum()

    return Laws(vocabulary, depth, make_law)


def same_everywhere(depth: int, *law: float) -> Laws:
    return Laws(len(law), depth, lambda: torch.tensor(law, dtype=torch.float64))


def most_likely(laws: Laws) -> Laws:
    """Point masses at the likeliest tokens."""
    return laws.map(lambda law: torch.nn.functional.one_hot(law.argmax(), len(law)).double())


def verified_draft(p: Laws, q: Laws, k: int, verify=verify_tokens, *, point_mass=False, stops=lambda tokens: False):
    """A function of a chooser that drafts from q, verifies against p, and returns the draft and the verdict.

    Args:
        point_mass: draft the likeliest tokens of q instead, and hand no laws over.
        stops: whether the draft ends behind these tokens.
    """
    p_along, q_along = {}, {}  # of every draft, as tensors

    def run(chooser):
        tokens: tuple[int, ...] = ()
        while len(tokens) < k and not stops(tokens):
            law = q.after(tokens)
            tokens += (int(law.argmax()) if point_mass else chooser.categorical(law),)
        if tokens not in p_along:
            p_along[tokens] = p.along(tokens, len(tokens) + 1)
            q_along[tokens] = None if point_mass or not tokens else q.along(tokens, len(tokens))
        return tokens, verify(tokens, p_along[tokens], q_along[tokens], chooser)

    return run


def law_of_a_round(p: Laws, q: Laws, k: int, verify=verify_tokens, **drafting) -> Law:
    """The exact law of k + 1 tokens, of which one round emits the first few and the target alone the rest."""
    draft = verified_draft(p, q, k, verify, **drafting)

    def emitted(chooser):
        tokens, verdict = draft(chooser)
        return (*tokens[: verdict.accepted], verdict.token)

    law: Law = defaultdict(float)
    for start, probability in exact_law(emitted).items():
        for text, rest in p.of_texts(k + 1, start).items():
            law[text] += probability * rest
    return dict(law)


def accepted_in_a_round(p: Laws, q: Laws, k: int, verify, **drafting) -> float:
    """The exact expectation of the number of accepted draft tokens."""
    draft = verified_draft(p, q, k, verify, **drafting)
    return sum(n * probability for n, probability in exact_law(lambda chooser: draft(chooser)[1].accepted).items())


# The whole loop


def adjusted(law: Sequence[float], temperature: float = 1.0, top_k=None, top_p=None) -> dict[int, float]:
    """The same as `to_probs`, in plain Python, for laws without ties."""
    if temperature == 0:
        return {max(range(len(law)), key=law.__getitem__): 1.0}
    weights = {token: p ** (1 / temperature) for token, p in enumerate(law) if p > 0}
    ranked = sorted(weights, key=weights.get, reverse=True)[:top_k]
    total, mass, kept = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if top_p is None or mass < top_p:
            kept.append(token)
        mass += weights[token] / total
    return {token: weights[token] / sum(weights[t] for t in kept) for token in kept}


def law_of_texts(table: Tensor, prompt: Sequence[int], length: int, end: int | None = None, **sampling) -> Law:
    """The probability of every continuation of `length` tokens, or up to the first end token, by a `ScriptedModel`'s table."""
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, probability in laws.items():
            if text and text[-1] == end:
                longer[text] = probability
                continue
            previous, last = (0, *prompt, *text)[-2:]
            for token, p in adjusted(table[previous, last].tolist(), **sampling).items():
                longer[(*text, token)] = probability * p
        laws = longer
    return laws


def law_of_the_loop(
    target,
    drafter,
    prompt: Sequence[int],
    k: int,
    length: int,
    *,
    chooser=EnumeratingChooser,
    module=generate,
    **options,
) -> Law:
    """The exact law of the new tokens of `speculative_generate`: caches, rollbacks and all. `module`: a changed generate.py."""

    def run(path):
        with patch.object(module, "GeneratorChooser", lambda generator: path):
            return module.speculative_generate(
                target, torch.tensor([prompt]), drafter=drafter, k=k, max_new_tokens=length, **options
            ).new_tokens

    return exact_law(run, chooser)


# Counting


def frequencies(counts: Counter) -> Law:
    return {outcome: count / counts.total() for outcome, count in counts.items()}


def g_statistic(
    counts: Mapping[Hashable, int], law: Mapping[Hashable, float], level: float = 1e-4
) -> tuple[float, float]:
    """Likelihood-ratio statistic of counts against a law, and the limit that chance exceeds with probability `level`.

    The limit is the chi-square distribution's; all expected counts should be at least 5.
    """
    n = sum(counts.values())
    possible = {outcome: p for outcome, p in law.items() if p > 0}
    assert min(possible.values()) * n >= 5
    if any(count > 0 and outcome not in possible for outcome, count in counts.items()):
        return math.inf, 0.0
    g = 2 * sum(c * math.log(c / (n * possible[outcome])) for outcome, c in counts.items() if c > 0)
    return g, chi_square_limit(level, len(possible) - 1)


def chi_square_tail(x: float, freedom: float, noncentrality: float = 0.0) -> float:
    """P(χ² > x), the noncentral one as a Poisson mixture of central ones (Johnson, Kotz and Balakrishnan 1995, ch. 29)."""
    if noncentrality > 0:
        half, far = noncentrality / 2, int(noncentrality / 2 + 12 * math.sqrt(noncentrality / 2) + 30)
        weights = (math.exp(j * math.log(half) - half - math.lgamma(j + 1)) for j in range(far))
        return sum(weight * chi_square_tail(x, freedom + 2 * j) for j, weight in enumerate(weights))
    a, y = freedom / 2, x / 2
    # The series of the incomplete gamma function: P(χ² <= x) = Σ y^(a+n) e^-y / Γ(a+n+1).
    below = sum(
        math.exp((a + n) * math.log(y) - y - math.lgamma(a + n + 1)) for n in range(int(y + 12 * math.sqrt(y) + 60))
    )
    return max(0.0, 1 - below)


@functools.cache
def chi_square_limit(level: float, freedom: int) -> float:
    """The x with P(χ² > x) = level, by halving."""
    low, high = 0.0, freedom + 40 * math.sqrt(freedom)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, freedom) > level else (low, middle)
    return high


def power(distance: float, n: int, freedom: int, level: float = 1e-4) -> float:
    """A lower bound for the probability that the G-test notices a law at this total variation distance with n draws.

    The statistic's noncentrality is 2n KL, at least 4n TV² by Pinsker's inequality.
    """
    return chi_square_tail(chi_square_limit(level, freedom), freedom, 4 * n * distance**2)
