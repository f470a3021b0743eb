"""Scores of finite test sets: their 95 % confidence intervals, and as many digits as the number of images supports."""

from collections.abc import Mapping
from math import sqrt

Z = 1.959963984540054  # 95 % of a standard normal distribution lie within ± Z
PRECISIONS = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}


def wilson(correct: float, images: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share of independent images, as bounds in [0, 1].

    It inverts the score test. Unlike the share ± 1.96 standard errors, it has a width if none or all are correct: for
    24 of 24 it is 0.86 to 1. Source: Wilson, Probable inference, the law of succession, and statistical inference,
    Journal of the American Statistical Association 22, 1927.
    """
    centre = (correct + Z**2 / 2) / (images + Z**2)
    half = Z / (images + Z**2) * sqrt(max(correct * (1 - correct / images), 0.0) + Z**2 / 4)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def percent(share: float | None, images: int | None = None) -> str:
    """A share in [0, 1] as text; a dash if it is undefined."""
    return "-" if share is None else f"{100 * share:.{_decimals(images)}f} %"


def span(low: float | None, high: float | None, images: int | None = None) -> str:
    """An interval of shares in [0, 1] as text, such as "86 to 100 %"; a dash if it is undefined."""
    if low is None or high is None:
        return "-"
    return f"{100 * low:.{_decimals(images)}f} to {percent(high, images)}"


def accuracy_text(accuracy: float, images: int | None) -> str:
    """An accuracy with its interval: "96 % (23 of 24 images, 95 % interval 80 to 99 % by Wilson)"."""
    if not images:
        return percent(accuracy)
    correct = round(accuracy * images)
    bounds = span(*wilson(correct, images), images)
    return f"{percent(accuracy, images)} ({correct:,} of {images:,} images, 95 % interval {bounds} by Wilson)"


def precision_text(shares: Mapping[str, float | None], images: int | None) -> str:
    """APs with the interval of the first: "AP 61 % (24 images, 95 % interval 47 to 75 % by bootstrap)"."""
    bounds = span(shares.get("ap_low"), shares.get("ap_high"), images)
    about = [f"{images:,} images"] if images else []
    about += [f"95 % interval {bounds} by bootstrap"] if bounds != "-" else []
    words = [f"{name} {percent(shares[key], images)}" for key, name in PRECISIONS.items() if key in shares]
    return ", ".join([f"{words[0]} ({', '.join(about)})" if about else words[0], *words[1:]])


def _decimals(images: int | None) -> int:
    return 1 if images is None else (images > 100) + (images > 1000)
