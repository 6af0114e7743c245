"""How often a certificate is false where a model is worse by exactly the margin: exactly, and by 10,000 draws.

python scripts/bench/certificate.py > scripts/bench/certificate_cpu_DATE.md
"""

import time

import numpy as np
from scipy.stats import binom

from kd.proof.paired import PairedCounts, loss_p_value, tango_score

SIZES = ((50, 0.05), (100, 0.05), (200, 0.05), (400, 0.01), (800, 0.01), (1265, 0.01))
"""Pictures, and the margin that so many can show."""
SHARES = (0.06, 0.1, 0.15, 0.2)
"""Shares of pictures on which the models differ."""
DRAWS, ERROR, Z = 10_000, 0.05, 1.6448536269514722


def least_certified(n: int, margin: float, numbers: np.ndarray) -> np.ndarray:
    """For each number of differing pictures the smallest number that the candidate alone must be right on."""
    least = []
    for number in numbers.tolist():
        low, high = 0, number + 1
        while low < high:
            middle = (low + high) // 2
            counts = PairedCounts(n, number - middle, middle)
            if loss_p_value(counts, margin) <= ERROR:
                high = middle
            else:
                low = middle + 1
        least.append(high)
    return np.array(least)


def main() -> None:
    """Prints the table."""
    random = np.random.default_rng(0)
    print("# False certificates at the margin, confidence 95 %\n")
    print(
        f"{time.strftime('%Y-%m-%d')}, two CPU cores. `exactly` sums all tables; `drawn` counts {DRAWS:,} draws,"
    )
    print("standard error 0.2 %; `Tango alone`: the same draws, with the score taken for normal.\n")
    print("| pictures | margin, points | models differ on | exactly | drawn | Tango alone |")
    print("|---|---|---|---|---|---|")
    for n, margin in SIZES:
        for share in SHARES:
            spread = 4.5 * (n * share * (1 - share)) ** 0.5
            first, last = max(0, int(n * share - spread)), min(n, int(n * share + spread) + 1)
            numbers = np.arange(first, last + 1)
            least = least_certified(n, margin, numbers)
            theta = (share - margin) / 2 / share
            exactly = (binom.pmf(numbers, n, share) * binom.sf(least - 1, numbers, theta)).sum()

            differing = random.binomial(n, share, DRAWS)
            candidate = random.binomial(differing, theta)
            places = np.clip(differing - first, 0, len(least) - 1)
            drawn = (candidate >= least[places]).mean()
            tango = (tango_score(n, differing - candidate, candidate, margin) >= Z).mean()
            cells = (
                n,
                f"{100 * margin:g}",
                f"{share:.0%}",
                *(f"{x:.2%}" for x in (exactly, drawn, tango)),
            )
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
