"""How often a position of a given text is drafted and judged: counting without drawing the coins.

Speculative decoding with probabilistic drafts outputs the target's own text (Leviathan et al., arXiv
2211.17192, appendix A.1). Given that text x, the draft at a judged position t was accepted with probability
a_t = min(1, q_t(x_t) / p_t(x_t)), independently of the other positions: it must have been x_t, drawn from q_t
and kept. So whether a position is judged is a Markov chain on (position, place in the draft step) that can be
summed instead of simulated, and that reads x before t only.
"""

from __future__ import annotations

import numpy as np


def attempt_weights(accept: np.ndarray, k: int) -> np.ndarray:
    """Probability that each output position's draft is judged, given the text.

    A draft step that starts at position s judges s, s + 1, ... until a draft is rejected or k are accepted;
    the next step starts at the position after the one that the target filled itself. Position 0 of an output
    comes from the prefill and is never judged, so ``accept`` starts at position 1, where the first step does.

    Args:
        accept: a_t of positions 1, 2, ... of one output, shape (positions,), within 0..1.
        k: drafts a step.

    Returns:
        w_t in 0..1, shape (positions,). With o_t = sum_x min(p_t, q_t) the sums of w_t o_t and of w_t over
        positions and outputs have the expectations of the counted accepted drafts and judged drafts, censored
        at emission: their ratio estimates the counted α̂, without the noise of acceptance.
    """
    accept = np.asarray(accept, dtype=np.float64)
    weights = np.zeros(len(accept))
    # Probability that the position is judged as draft number j of its step, and that it is the target's own.
    place, skipped = np.zeros(k), 0.0
    place[0] = 1.0
    for t, a in enumerate(accept):
        weights[t] = place.sum()
        moved = np.empty(k)
        moved[0] = weights[t] * (1.0 - a) + skipped
        moved[1:] = place[:-1] * a
        skipped = place[-1] * a
        place = moved
    return weights
