"""The law of what a piece of code emits: exactly, by following every branch of its draws, or by counting."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

from torch import Tensor


class EnumeratingChooser:
    """Replays a path of choices, then takes the first possible branch everywhere and notes the others."""

    def __init__(self, path: tuple[int, ...] = ()) -> None:
        self.path = path
        self.probability = 1.0
        self.other_paths: list[tuple[int, ...]] = []
        self._taken: tuple[int, ...] = ()

    def bernoulli(self, probability: float) -> bool:
        return self._choose([1 - probability, probability]) == 1

    def categorical(self, weights: Tensor) -> int:
        return self._choose((weights.double() / weights.double().sum()).tolist())

    def _choose(self, probabilities: Sequence[float]) -> int:
        step = len(self._taken)
        if step < len(self.path):
            choice = self.path[step]
        else:
            choice, *others = [i for i, probability in enumerate(probabilities) if probability != 0]
            self.other_paths += [(*self._taken, other) for other in others]
        self._taken += (choice,)
        self.probability *= probabilities[choice]
        return choice


def exact_law(run: Callable[[EnumeratingChooser], Hashable]) -> dict[Hashable, float]:
    """The probability of every outcome of `run(chooser)`, depth first over all its draws."""
    law: dict[Hashable, float] = defaultdict(float)
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        chooser = EnumeratingChooser(waiting.pop())
        law[run(chooser)] += chooser.probability
        waiting += chooser.other_paths
    return dict(law)


def largest_difference(a: Mapping[Hashable, float], b: Mapping[Hashable, float]) -> float:
    return max(abs(a.get(outcome, 0.0) - b.get(outcome, 0.0)) for outcome in a.keys() | b.keys())


def total_variation(counts: Counter, law: Mapping[Hashable, float]) -> float:
    n = counts.total()
    return sum(abs(counts[outcome] / n - law.get(outcome, 0.0)) for outcome in counts.keys() | law.keys()) / 2


def g_statistic(counts: Counter, law: Mapping[Hashable, float]) -> tuple[float, float]:
    """Likelihood-ratio statistic of counts against a law, and the value that chance exceeds once in 10 000 times.

    The limit is Wilson and Hilferty's approximation of the chi-square quantile; all expected counts should be at least 5.
    """
    n = counts.total()
    possible = {outcome: p for outcome, p in law.items() if p > 0}
    assert min(possible.values()) * n >= 5
    if counts.keys() - possible.keys():
        return math.inf, 0.0
    g = 2 * sum(c * math.log(c / (n * possible[outcome])) for outcome, c in counts.items())
    freedom = len(possible) - 1
    return g, freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
